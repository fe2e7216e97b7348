"""Runs batches on the model: `prefill` computes prompts, `decode` adds a token and right guesses to every sequence."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from engine.attention.kv_cache import KVCache
from engine.core.batch import Batch, RequestStepOutput, ScheduledRequest, StepOutput, TokenLogprobs
from engine.runner.forward import Forward
from engine.runner.loaded_model import LoadedModel
from engine.runner.logprobs import Scorer
from engine.runner.model_inputs import build_inputs
from engine.runner.pooling import embedding_bytes
from engine.runner.sampler import Sampler
from engine.scheduling.speculation.draft_verification import last_row, num_accepted_drafts, rows_of, with_draft_token

logger = logging.getLogger(__name__)


class ModelRunner:
    """Stateless but for the KV cache: a batch carries everything else."""

    def __init__(
        self, model: LoadedModel, cache: KVCache, forward: Forward, draft_forward: Forward | None = None
    ) -> None:
        """Both write to `cache`; `draft_forward` runs the weights that guess, if there are any."""
        self._model = model
        self._cache = cache
        self._run_model = forward
        self._run_draft_model = draft_forward
        self._scorer = Scorer(model.has_kernels)
        self._sampler = Sampler(model.device, model.has_kernels, model.eos_token_ids)

    @torch.inference_mode()
    def prefill(self, batch: Batch) -> StepOutput:
        """Compute a chunk of each prompt; the requests whose last chunk it is get their next token."""
        counts = [_num_kept(request) for request in batch.requests]
        logits = self._forward(batch, _kept_positions(batch.requests, counts))
        rows = _side_by_side(counts)
        sampling = [(own[-1], request) for own, request in zip(rows, batch.requests, strict=True) if request.samples]
        said = self._say_one_each(logits[[row for row, _ in sampling]], [request for _, request in sampling])
        if not sampling:
            logits[-1, 0].item()  # waits for a GPU, so that the step's duration, from which gaps are predicted, is true
        embeddings = self._embed(sampling)
        return StepOutput(
            tuple(
                replace(
                    said.get(request.request_id) or RequestStepOutput(request.request_id),
                    prompt_logprobs=self._score_prompt(request, logits[own.start : own.stop]),
                    embedding=embeddings.get(request.request_id, b""),
                )
                for own, request in zip(rows, batch.requests, strict=True)
            )
        )

    @torch.inference_mode()
    def decode(self, batch: Batch) -> StepOutput:
        """Compute the newest token of every request, and what it guesses, and get those that come next."""
        logits = self._forward(batch, None)
        chosen = self._sampler.sample(logits, [row for request in batch.requests for row in rows_of(request)])
        rows = _side_by_side([len(request.token_ids) for request in batch.requests])
        return StepOutput(tuple(self._say(batch.requests, rows, logits, chosen)))

    @torch.inference_mode()
    def draft(self, batch: Batch) -> Batch:
        """The batch with the guesses that its requests want. Each is chosen as if those before it had been said."""
        assert self._run_draft_model is not None, "guesses are wanted of weights that were not loaded"
        requests = list(batch.requests)
        while wanting := [index for index, each in enumerate(requests) if each.num_wanted > each.num_drafts]:
            rows = [last_row(requests[index]) for index in wanting]
            logits = self._run_draft_model(build_inputs(rows, self._cache.block_size, self._model.device), None)
            for index, token_id in zip(wanting, self._sampler.sample(logits, rows), strict=True):
                requests[index] = with_draft_token(requests[index], token_id)
        return replace(batch, requests=tuple(requests))

    def _forward(self, batch: Batch, kept: Sequence[int] | None) -> Tensor:
        """Logits [num_kept, vocab] at the `kept` flat positions; None keeps all."""
        block_size = self._cache.block_size
        last_block = max(request.block_table[(request.end - 1) // block_size] for request in batch.requests)
        self._cache.prefault(last_block, batch.num_tokens)
        return self._run_model(build_inputs(batch.requests, block_size, self._model.device), kept)

    def _say_one_each(self, logits: Tensor, requests: Sequence[ScheduledRequest]) -> dict[str, RequestStepOutput]:
        """By the id of the request; `logits` [len(requests), vocab]."""
        rows = [range(row, row + 1) for row in range(len(requests))]
        said = self._say(requests, rows, logits, self._sampler.sample(logits, requests))
        return {each.request_id: each for each in said}

    def _say(
        self,
        requests: Sequence[ScheduledRequest],
        rows: Sequence[Sequence[int]],
        logits: Tensor,
        chosen: Sequence[int | None],
    ) -> list[RequestStepOutput]:
        """What each request says with its `rows` of all that was `chosen` of `logits`."""
        said = [_said(request, own, chosen) for request, own in zip(requests, rows, strict=True)]
        scores = self._scorer.score_rows(
            logits,
            [
                (row, token_id, request.params.logprobs)
                for request, pairs in zip(requests, said, strict=True)
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
            for request, own, pairs in zip(requests, rows, said, strict=True)
        ]

    def _score_prompt(self, request: ScheduledRequest, logits: Tensor) -> tuple[TokenLogprobs, ...]:
        """Position p of a prompt scores its token p + 1; `logits` [num_tokens, vocab] of a request that asks for it."""
        if not request.scores_prompt:
            return ()
        targets = request.prompt_token_ids[request.start + 1 : request.end + 1]
        return self._scorer.score(logits[: len(targets)], targets, request.params.prompt_logprobs or 0)

    def _embed(self, rows: Sequence[tuple[int, ScheduledRequest]]) -> dict[str, bytes]:
        """Embeddings of the requests that ask for one, each from its row of the head's inputs."""
        return {
            request.request_id: embedding_bytes(self._model.head_inputs.newest[row])
            for row, request in rows
            if request.params.returns_embedding
        }


def _said(request: ScheduledRequest, rows: Sequence[int], chosen: Sequence[int | None]) -> Sequence[tuple[int, int]]:
    """Rows and tokens: as many as it guessed right, and what comes next."""
    num_said = 1 + num_accepted_drafts(request, [chosen[row] for row in rows])
    return [(row, token_id) for row in rows[:num_said] if (token_id := chosen[row]) is not None]


def _num_kept(request: ScheduledRequest) -> int:
    """Of how many of its last positions the logits are needed: of all to score them, of one to sample."""
    return len(request.token_ids) if request.scores_prompt else int(request.samples)


def _kept_positions(requests: Sequence[ScheduledRequest], counts: Sequence[int]) -> list[int]:
    """In the batch: the last ones of each request."""
    ends = accumulate(len(request.token_ids) for request in requests)
    return [flat for end, count in zip(ends, counts, strict=True) for flat in range(end - count, end)]


def _side_by_side(counts: Sequence[int]) -> list[range]:
    """So many rows each, one after the other."""
    return [range(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]
