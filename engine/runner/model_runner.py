"""Runs batches on the model.

`prefill` computes chunks of prompts; `decode` computes the newest token and the draft tokens of every request, and
samples what follows; `draft` proposes draft tokens with the draft model.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, chain

import torch
from torch import Tensor

from engine.attention.kv_cache import KVCache
from engine.core.adapters import Adapters, NoAdapters
from engine.core.batch import Batch, RequestStepOutput, ScheduledRequest, StepOutput, TokenLogprobs
from engine.core.errors import DeviceFailedError, reason_of
from engine.mixers.state import StateCache
from engine.runner.forward import Forward
from engine.runner.loaded_model import LoadedModel
from engine.runner.model_inputs import build_inputs
from engine.runner.pooling import embedding_bytes
from engine.runner.proposer import NoProposer, Proposer
from engine.runner.row_gather import take_rows
from engine.runner.sampler_choice import choose_sampler, choose_scorer
from engine.scheduling.speculation.draft_verification import num_accepted_drafts, rows_of
from engine.weights.kernel_experts import take_experts_read

logger = logging.getLogger(__name__)


@contextmanager
def _telling_of_the_device() -> Iterator[None]:
    """Raises DeviceFailedError where a CUDA error has ended the process's use of the device. Where memory runs out,
    which is another error, later steps can still run."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceFailedError(f"The device failed: {reason_of(error)}") from error


class ModelRunner:
    """Runs batches on the model. It is stateless but for the KV cache and the adapters that are loaded: a batch carries
    everything else."""

    def __init__(
        self,
        model: LoadedModel,
        cache: KVCache,
        forward: Forward,
        proposer: Proposer | None = None,
        adapters: Adapters | None = None,
        states: StateCache | None = None,
    ) -> None:
        """`forward` and `proposer`, which runs the draft model if there is one, write to `cache`, and `forward` to
        `states`."""
        self.adapters = adapters or NoAdapters()
        self.states = states
        self._model = model
        self._cache = cache
        self._run_model = forward
        self._proposer = proposer or NoProposer()
        self._scorer = choose_scorer(model.device, model.has_kernels)
        self._sampler = choose_sampler(model.device, model.has_kernels, model.eos_token_ids)

    def _take_experts_read(self) -> float | None:
        return take_experts_read() if self._model.has_kernels and self._model.size.expert_bytes else None

    @property
    def cache(self) -> KVCache:
        """The model's own KV cache, without that of a draft model."""
        return self._cache.of_layers(slice(len(self._model.layers)))

    @torch.inference_mode()
    @_telling_of_the_device()
    def prefill(self, batch: Batch) -> StepOutput:
        """Computes a chunk of each prompt, and samples a token for the requests whose last chunk it is."""
        counts = [_num_kept(request) for request in batch.requests]
        logits, hidden, experts_read = self._forward(batch, _kept_positions(batch.requests, counts))
        rows = _consecutive(counts)
        sampling = [(own[-1], request) for own, request in zip(rows, batch.requests, strict=True) if request.samples]
        last = take_rows(logits, [row for row, _ in sampling])
        outputs = self._sample_one_each(last, [request for _, request in sampling])
        if not sampling:
            logits[-1, 0].item()  # waits for a GPU: step durations, from which gaps are predicted, must be true
        embeddings = _embeddings(sampling, hidden)
        return StepOutput(
            tuple(
                replace(
                    outputs.get(request.request_id) or RequestStepOutput(request.request_id),
                    prompt_logprobs=self._score_prompt(request, logits[own.start : own.stop]),
                    embedding=embeddings.get(request.request_id, b""),
                )
                for own, request in zip(rows, batch.requests, strict=True)
            ),
            experts_read,
        )

    @torch.inference_mode()
    @_telling_of_the_device()
    def decode(self, batch: Batch) -> StepOutput:
        """Computes the newest token and the draft tokens of every request, and samples the tokens that follow.

        A request gets one token, and one more for each accepted draft token.
        """
        logits, _, experts_read = self._forward(batch, None)
        sampled = self._sampler.sample(logits, [row for request in batch.requests for row in rows_of(request)])
        rows = _consecutive([len(request.token_ids) for request in batch.requests])
        if (
            batch.num_drafts and batch.requests[0].state_slot is not None
        ):  # all requests of a model have states, or none
            self._run_model.settle([_num_verified(*each, sampled) for each in zip(batch.requests, rows, strict=True)])
        return StepOutput(tuple(self._outputs_of(batch.requests, rows, logits, sampled)), experts_read)

    @torch.inference_mode()
    @_telling_of_the_device()
    def draft(self, batch: Batch) -> Batch:
        """Returns the batch with the draft tokens that its requests want, sampled one after the other."""
        return self._proposer.draft(batch)

    def _forward(self, batch: Batch, kept: Sequence[int] | None) -> tuple[Tensor, Tensor, float | None]:
        """Runs the model, and what proposes beside it. Returns logits and hidden states at the `kept` positions of the
        flat batch, None keeps all, and the share of the experts that was read, if it is known."""
        block_size = self._cache.block_size
        last_block = max(
            table[(request.end - 1) // block_size]
            for request in batch.requests
            for table in (request.block_table, *request.window_tables)
        )
        self._cache.prefault(last_block, batch.num_tokens)
        inputs = build_inputs(batch.requests, block_size, self._model.device)
        if copies := tuple(chain.from_iterable(request.block_copies for request in batch.requests)):
            self._cache.copy_blocks(copies)
            inputs = replace(inputs, block_copies=copies)
        self._take_experts_read()  # what a draft model read
        output = self._run_model(inputs, kept, self._proposer.hidden_of)
        experts_read = self._take_experts_read()
        self._proposer.observe(batch, output.all_hidden)
        return output.logits, output.hidden, experts_read

    def _sample_one_each(self, logits: Tensor, requests: Sequence[ScheduledRequest]) -> dict[str, RequestStepOutput]:
        """Samples one token per request from `logits` [len(requests), vocab]; returns outputs by request id."""
        rows = [range(row, row + 1) for row in range(len(requests))]
        outputs = self._outputs_of(requests, rows, logits, self._sampler.sample(logits, requests))
        return {output.request_id: output for output in outputs}

    def _outputs_of(
        self,
        requests: Sequence[ScheduledRequest],
        rows: Sequence[Sequence[int]],
        logits: Tensor,
        sampled: Sequence[int | None],
    ) -> list[RequestStepOutput]:
        """Returns each request's output: what was `sampled` at its `rows` of `logits`, up to its first wrong draft."""
        kept = [_kept_tokens(request, own, sampled) for request, own in zip(requests, rows, strict=True)]
        scores = self._scorer.score_rows(
            logits,
            [
                (row, token_id, request.params.logprobs)
                for request, pairs in zip(requests, kept, strict=True)
                for row, token_id in pairs
                if request.params.logprobs is not None
            ],
        )
        return [
            RequestStepOutput(
                request.request_id,
                tuple(token_id for _, token_id in pairs),
                tuple(scores[row] for row, _ in pairs if row in scores),
                is_finite=bool(pairs) or bool(logits[own[0]].max().isfinite()),
            )
            for request, own, pairs in zip(requests, rows, kept, strict=True)
        ]

    def _score_prompt(self, request: ScheduledRequest, logits: Tensor) -> tuple[TokenLogprobs, ...]:
        """Returns the prompt log-probabilities of a request that asks for them: position p scores token p + 1.

        `logits` are [num_tokens, vocab] then.
        """
        if not request.scores_prompt:
            return ()
        targets = request.prompt_token_ids[request.start + 1 : request.end + 1]
        return self._scorer.score(logits[: len(targets)], targets, request.params.prompt_logprobs or 0)


def _embeddings(rows: Sequence[tuple[int, ScheduledRequest]], hidden: Tensor) -> dict[str, bytes]:
    """Returns the embeddings of the requests that ask for one, each from its row of the hidden states."""
    return {
        request.request_id: embedding_bytes(hidden[row]) for row, request in rows if request.params.returns_embedding
    }


def _kept_tokens(
    request: ScheduledRequest, rows: Sequence[int], sampled: Sequence[int | None]
) -> Sequence[tuple[int, int]]:
    """Returns (row, token id) of the request's accepted draft tokens, and of the token that follows them."""
    kept = rows[: _num_verified(request, rows, sampled)]
    return [(row, token_id) for row in kept if (token_id := sampled[row]) is not None]


def _num_verified(request: ScheduledRequest, rows: Sequence[int], sampled: Sequence[int | None]) -> int:
    """Returns how many of the request's tokens are its own: those without drafts, and the drafts accepted."""
    return 1 + num_accepted_drafts(request, [sampled[row] for row in rows])


def _num_kept(request: ScheduledRequest) -> int:
    """Returns at how many of the chunk's last positions logits are needed: all to score a prompt, one to sample."""
    return len(request.token_ids) if request.scores_prompt else int(request.samples)


def _kept_positions(requests: Sequence[ScheduledRequest], counts: Sequence[int]) -> list[int]:
    """Returns the positions in the flat batch of each request's last `counts` tokens."""
    ends = accumulate(len(request.token_ids) for request in requests)
    return [flat for end, count in zip(ends, counts, strict=True) for flat in range(end - count, end)]


def _consecutive(counts: Sequence[int]) -> list[range]:
    """Returns consecutive ranges of rows, one of each length in `counts`."""
    return [range(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]
