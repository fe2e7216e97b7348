"""Measures how far the logits of the model runner are from those of transformers in float32."""

import random
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from engine.attention import select_backend
from engine.attention.kv_cache import KVCache
from engine.core.batch import Batch, Phase, ScheduledRequest
from engine.core.sampling_params import SamplingParams
from engine.kernels import load_kernels
from engine.mixers.state import StateCache
from engine.model.forward_choice import choose_forward
from engine.runner.forward import Forward, ForwardOutput, HiddenOf
from engine.runner.loaded_model import LoadedModel
from engine.runner.model_inputs import ModelInputs
from engine.runner.model_runner import ModelRunner
from tests.engine.tiny_models import VOCAB_SIZE, ReferenceModel

BLOCK_SIZE = 16
NUM_DECODES = 8  # the last tokens of each sequence, one a step
PARAMS = SamplingParams(temperature=0.0, prompt_logprobs=0)


def sequences(lengths: Sequence[int], seed: int = 3) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


class _RecordingForward:
    """Wraps a forward pass and keeps the logits of each step."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.logits: list[Tensor] = []  # of each step, [num_tokens, vocab]

    def __call__(self, inputs: ModelInputs, kept: Sequence[int] | None, hidden_of: HiddenOf = None) -> ForwardOutput:
        output = self._forward(inputs, kept, hidden_of)
        self.logits.append(output.logits.float())
        return output


def runner_logits(model: LoadedModel, token_ids: Sequence[Sequence[int]], chunk: int) -> list[Tensor]:
    """Runs all sequences in one batch, prefill in chunks of `chunk` tokens each and then decode.

    Returns the logits [length, vocab] of each sequence.
    """
    num_blocks = -(-max(map(len, token_ids)) // BLOCK_SIZE)  # of each
    cache = KVCache(model.layers, num_blocks * len(token_ids), BLOCK_SIZE, model.kv_dtype, model.device)
    states = StateCache(model.states, len(token_ids), model.device)
    backend = select_backend(model.device, load_kernels())
    forward = _RecordingForward(choose_forward(model.module, cache, backend, states))
    runner = ModelRunner(model, cache, forward)
    rows: list[list[Tensor]] = [[] for _ in token_ids]
    for batch in _batches(token_ids, chunk, num_blocks, bool(model.states)):
        getattr(runner, batch.phase)(batch)
        parts = forward.logits[-1].split([len(request.token_ids) for request in batch.requests])
        for request, part in zip(batch.requests, parts, strict=True):
            rows[int(request.request_id)].append(part)
    return [torch.cat(parts) for parts in rows]


def _batches(token_ids: Sequence[Sequence[int]], chunk: int, num_blocks: int, has_states: bool) -> list[Batch]:
    """Returns the steps: prefill until the longest prompt is computed, then decode. Block tables run backwards."""
    steps: dict[tuple[Phase, int], list[ScheduledRequest]] = {}
    for index, tokens in enumerate(token_ids):
        first, prompt = num_blocks * index, tokens[:-NUM_DECODES]
        table = tuple(reversed(range(first, first + num_blocks)))
        starts = [*range(0, len(prompt), chunk), *range(len(prompt), len(tokens) + 1)]
        for step, (start, end) in enumerate(pairwise(starts)):
            phase = Phase.PREFILL if start < len(prompt) else Phase.DECODE
            number = step if phase is Phase.PREFILL else start - len(prompt)
            request = ScheduledRequest(
                *(str(index), tokens[start:end], start, table, PARAMS, tokens, [], True),
                state_slot=index if has_states else None,
                scores_prompt=True,
            )
            steps.setdefault((phase, number), []).append(request)
    order = sorted(steps, key=lambda step: (step[0] is Phase.DECODE, step[1]))
    return [Batch(phase, tuple(steps[phase, number])) for phase, number in order]


@torch.inference_mode()
def reference_logits(reference: ReferenceModel, token_ids: Sequence[Sequence[int]]) -> list[Tensor]:
    return [reference.model(torch.tensor([tokens])).logits[0] for tokens in token_ids]


def relative_error(logits: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """Returns the RMS error of the logits divided by the RMS of the true ones.

    Each position's mean is subtracted from both, since no probability depends on it.
    """
    ours, theirs = (torch.cat(list(each)) for each in (logits, truth))
    wrong = (ours - theirs) - (ours - theirs).mean(1, keepdim=True)
    return float(wrong.norm() / (theirs - theirs.mean(1, keepdim=True)).norm())
