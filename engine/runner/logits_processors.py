"""Logits processors: a request's biases, masks and penalties, applied to its row before a token is sampled."""

from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.core.batch import ScheduledRequest
from engine.core.sampling_params import SamplingParams

__all__ = ["adjust_row", "adjusts_logits", "banned_ids", "forbid_tokens", "forced_id_of"]


def adjusts_logits(request: ScheduledRequest) -> bool:
    """Whether `adjust_row` would change the request's row in this step."""
    params = request.params
    return bool(
        params.needs_history
        or params.logit_bias
        or params.allowed_token_ids
        or len(request.output_token_ids) < params.min_tokens
        or forced_id_of(request) is not None
    )


def adjust_row(row: Tensor, request: ScheduledRequest, eos_token_ids: tuple[int, ...]) -> None:
    """Changes `row` [vocab] float32 in place: bias, masks, then penalties.

    A forced token (the end of a thinking budget) overrides them all, unless `forbid_tokens` has masked it: a grammar
    does not allow it in the middle of a character.
    """
    params = request.params
    if (forced_id := forced_id_of(request)) is not None and row[forced_id] != -torch.inf:
        row.fill_(-torch.inf)
        row[forced_id] = 0.0
        return
    if params.logit_bias:
        row[_ids(params.logit_bias, row)] += torch.tensor(list(params.logit_bias.values()), device=row.device)
    if params.allowed_token_ids:
        allowed = _ids(params.allowed_token_ids, row)
        kept = row[allowed]
        row.fill_(-torch.inf)
        row[allowed] = kept
    banned = list(banned_ids(request, eos_token_ids))
    if banned:
        row[_ids(banned, row)] = -torch.inf
    _penalize(row, params, request)


def forbid_tokens(logits: Tensor, requests: Sequence[ScheduledRequest]) -> None:
    """Masks, in each row of `logits` [len(requests), vocab], the tokens that its request's grammar does not allow."""
    packed = {row: request.allowed_tokens[0] for row, request in enumerate(requests) if request.allowed_tokens}
    if not packed:
        return
    bits = np.frombuffer(b"".join(packed.values()), np.uint8).reshape(len(packed), -1)
    allowed = np.unpackbits(bits, axis=1, count=logits.shape[1], bitorder="little")  # [len(packed), vocab]
    forbidden = torch.from_numpy(allowed == 0).to(logits.device)
    for row, is_forbidden in zip(packed, forbidden, strict=True):
        logits[row].masked_fill_(is_forbidden, -torch.inf)


def forced_id_of(request: ScheduledRequest) -> int | None:
    """Returns the token that must come next, if one must."""
    thinking = request.params.thinking
    return None if thinking is None else thinking.forced_id(request.output_token_ids)


def banned_ids(request: ScheduledRequest, eos_token_ids: tuple[int, ...]) -> Iterator[int]:
    """Yields tokens that may not come next: stops before min_tokens, and the last token of a bad word just begun."""
    params = request.params
    if len(request.output_token_ids) < params.min_tokens:
        yield from params.stop_token_ids
        yield from () if params.ignore_eos else eos_token_ids
    for word in params.bad_words:
        if _has_begun(word, request):
            yield word[-1]


def _has_begun(word: tuple[int, ...], request: ScheduledRequest) -> bool:
    """Whether the request's newest tokens are the word without its last token."""
    begun, newest = word[:-1], request.output_token_ids or request.prompt_token_ids
    # Comparing one token first rules most words out without building a tail.
    return not begun or (begun[-1] == newest[-1] and _tail(request, len(begun)) == begun)


def _tail(request: ScheduledRequest, count: int) -> tuple[int, ...]:
    """Returns the last `count` tokens of the prompt followed by the output."""
    tail = request.output_token_ids[-count:]
    missing = count - len(tail)
    return (*(request.prompt_token_ids[-missing:] if missing else ()), *tail)


def _penalize(row: Tensor, params: SamplingParams, request: ScheduledRequest) -> None:
    """Applies the repetition penalty over prompt and output (Keskar et al., CTRL, 2019), the others over the output."""
    if params.repetition_penalty != 1.0:
        seen = torch.unique(_ids([*request.prompt_token_ids, *request.output_token_ids], row))
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and request.output_token_ids:
        seen, counts = torch.unique(_ids(request.output_token_ids, row), return_counts=True)
        row[seen] -= params.presence_penalty + params.frequency_penalty * counts.to(row.dtype)


def _ids(token_ids: Iterable[int], row: Tensor) -> Tensor:
    """Returns `token_ids`, at least one, as a tensor on the row's device.

    For a long history this takes a quarter of the time of `torch.tensor` of a list.
    """
    return torch.frombuffer(array("q", token_ids), dtype=torch.long).to(row.device)
