"""Helpers for tests of sampling: a scheduled request, tokens that are sampled for it, and its processed logits."""

from collections.abc import Sequence
from typing import Any

import torch

from engine.core.batch import ScheduledRequest
from engine.core.sampling_params import SamplingParams
from engine.runner.logits_processors import adjust_row
from engine.runner.sampler import Sampler

EOS = (0,)
CPU = torch.device("cpu")


def scheduled(
    position: int = 5,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    allowed: Sequence[int] | None = None,
    **params: Any,
) -> Any:
    return ScheduledRequest(
        request_id="r",
        token_ids=(1,),
        start=position - 1,
        block_table=(),
        params=SamplingParams(**params),
        prompt_token_ids=prompt,
        output_token_ids=output,
        samples=True,
        allowed_tokens=() if allowed is None else (sum(1 << token_id for token_id in allowed).to_bytes(4, "little"),),
    )


def draw(logits: torch.Tensor, requests: list[ScheduledRequest]) -> list[int | None]:
    return Sampler(CPU, has_kernels=False, eos_token_ids=EOS).sample(logits, requests)


def adjusted(row: list[float], **fields: Any) -> list[float]:
    logits = torch.tensor(row)
    adjust_row(logits, scheduled(**fields), EOS)
    return logits.tolist()
