"""A fake runner that checks the scheduler: KV is a dict by (block, offset), and every step reads its whole context.

What is stored for a token names the token and everything before it, as real keys and values depend on it. So does what
is stored in a state slot, which is the state after the newest token.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from engine.assembly import assemble
from engine.core.batch import Batch, Phase, RequestStepOutput, ScheduledRequest, StepOutput, TokenLogprobs
from engine.core.config import EngineConfig, EngineInfo
from engine.core.draft import Drafter
from engine.core.kv_groups import ONE_GROUP, KVGroups
from engine.core.machine import Ceilings, ModelSize
from engine.core.messages import RequestUpdate
from engine.core.sampling_params import SamplingParams
from engine.engine import Engine
from engine.scheduling.speculation.draft_verification import rows_of, with_draft_token
from engine.scheduling.speculation.prompt_lookup import PromptLookup
from tests.engine.requests import adding

EOS = 0
VOCAB_SIZE = 50


def next_token(context: Sequence[int], seed: int = 0) -> int:
    """Returns a token that is a pure function of the whole context; it is EOS about once in 50 times."""
    digest = hashlib.sha256(repr((seed, list(context))).encode()).digest()
    return int.from_bytes(digest[:4]) % VOCAB_SIZE


class FakeRunner:
    def __init__(self, block_size: int, errs: Callable[[], bool] = lambda: False, groups: KVGroups = ONE_GROUP) -> None:
        """`errs` decides which tokens of the draft model are wrong."""
        self.block_size = block_size
        self.groups = groups
        self.errs = errs
        self.kv: dict[tuple[int, int], tuple[int, ...]] = {}
        self.draft_kv: dict[tuple[int, int], tuple[int, ...]] = {}
        """That of a draft model with KV of its own."""
        self.states: dict[int, tuple[int, ...]] = {}
        self.batches: list[Batch] = []

    def prefill(self, batch: Batch) -> StepOutput:
        return self._run(batch)

    def decode(self, batch: Batch) -> StepOutput:
        assert all(len(request.token_ids) == 1 + request.num_drafts and request.samples for request in batch.requests)
        return self._run(batch)

    def draft(self, batch: Batch) -> Batch:
        """Drafts tokens and leaves KV that is not the model's, as a draft model does."""
        return replace(batch, requests=tuple(self._drafted(request) for request in batch.requests))

    def _drafted(self, request: ScheduledRequest) -> ScheduledRequest:
        assert not request.block_copies, "it would read what is copied in the step"
        self._compute_draft_span(request)
        has_own_kv = request.draft_span is not None
        assert not has_own_kv or not request.num_wanted or request.draft_span[1] == request.end
        while request.num_drafts < request.num_wanted:
            if has_own_kv:
                self._compute_draft_kv(request, request.end - 1, request.end)
            else:
                self.kv[self._slot(request, request.end - 1)] = (-1,)
            token_id = next_token(own_tokens(request), request.params.seed)
            request = with_draft_token(request, (token_id + 1) % VOCAB_SIZE if self.errs() else token_id)
        return request

    def _compute_draft_span(self, request: ScheduledRequest) -> None:
        if request.draft_span is not None:
            self._compute_draft_kv(request, *request.draft_span)

    def _compute_draft_kv(self, request: ScheduledRequest, start: int, end: int) -> None:
        """Computes positions from their tokens, after which the draft model must have all before them."""
        own = own_tokens(request)
        assert start < end <= len(own)
        for position in range(start, end):
            self.draft_kv[self._slot(request, position)] = own[: position + 1]
        for position in range(end):
            stored = self.draft_kv[self._slot(request, position)]
            assert stored == own[: position + 1], f"{request.request_id} drafts from KV that is not its own"

    def _run(self, batch: Batch) -> StepOutput:
        self.batches.append(batch)
        for request in batch.requests if batch.phase is Phase.PREFILL else ():
            self._compute_draft_span(request)
        for request in batch.requests:
            tokens = own_tokens(request)
            assert tokens[request.start :] == tuple(request.token_ids)
            self._advance_state(request, tokens)
            for source, target in request.block_copies:
                copied = {at: self.kv[source, at] for at in range(self.block_size) if (source, at) in self.kv}
                self.kv |= {(target, at): stored for at, stored in copied.items()}
            for group, table in enumerate(tables_of(request)):
                for position in range(request.start, request.end):
                    self.kv[self._slot_in(table, position)] = (*tokens[: position + 1], *[-1] * group)
        return StepOutput(tuple(self._answer(request) for request in batch.requests))

    def _advance_state(self, request: ScheduledRequest, tokens: tuple[int, ...]) -> None:
        if request.state_slot is not None:
            if request.restored_slot is not None:
                self.states[request.state_slot] = self.states[request.restored_slot]
            before = self.states.get(request.state_slot) if request.start else ()
            assert before == tokens[: request.start], f"{request.request_id} goes on from a state that is not its own"
            num_rejected = request.num_drafts and 1 + request.num_drafts - len(self._sampled(request))
            self.states[request.state_slot] = tokens[: len(tokens) - num_rejected]
            if request.saved_slot is not None:
                assert request.num_drafts == 0
                self.states[request.saved_slot] = tokens

    def _answer(self, request: ScheduledRequest) -> RequestStepOutput:
        own = own_tokens(request)
        for group, table in enumerate(tables_of(request)):
            window = self.groups.window if group >= self.groups.num_full else None
            for position in range(0 if window is None else max(0, request.start - window + 1), request.end):
                stored = self.kv[self._slot_in(table, position)]
                is_own = stored == (*own[: position + 1], *[-1] * group)
                assert is_own, f"{request.request_id} reads KV that is not its own"
        return RequestStepOutput(request.request_id, self._sampled(request), prompt_logprobs=_scores(request))

    def _sampled(self, request: ScheduledRequest) -> tuple[int, ...]:
        """Returns the token that follows the request's tokens, after the draft tokens that are accepted."""
        own, token_ids = own_tokens(request), list[int]()
        for row in rows_of(request) if request.samples else ():
            token_ids += self._choose(row)
            if own[row.end : row.end + 1] != tuple(token_ids[-1:]):
                break
        return tuple(token_ids)

    def _choose(self, request: ScheduledRequest) -> tuple[int, ...]:
        """Returns the token that follows the request's tokens, or none if none may."""
        return (next_token(own_tokens(request), request.params.seed),)

    def _slot(self, request: ScheduledRequest, position: int) -> tuple[int, int]:
        return self._slot_in(request.block_table, position)

    def _slot_in(self, table: Sequence[int], position: int) -> tuple[int, int]:
        return table[position // self.block_size], position % self.block_size


def tables_of(request: ScheduledRequest) -> tuple[tuple[int, ...], ...]:
    """Returns the block tables of each group of layers."""
    return request.block_table, *request.window_tables


def _scores(request: ScheduledRequest) -> tuple[TokenLogprobs, ...]:
    if not request.scores_prompt:
        return ()
    scored = request.prompt_token_ids[request.start + 1 : request.end + 1]
    return tuple(TokenLogprobs(token_id, -1.0, 1, ()) for token_id in scored)


def own_tokens(request: ScheduledRequest) -> tuple[int, ...]:
    """Returns prompt and output up to the end of this step, its drafts included."""
    return (*request.prompt_token_ids, *request.output_token_ids, *request.draft)[: request.end]


def fake_info(
    num_blocks: int,
    block_size: int,
    max_model_len: int = 10_000,
    has_draft_weights: bool = False,
    draft_kv_bytes: int = 0,
    num_state_slots: int | None = None,
    num_state_checkpoints: int = 0,
    has_head: bool = False,
    kv_groups: KVGroups = ONE_GROUP,
) -> EngineInfo:
    size = ModelSize(layer_bytes=1000, layer_flops=100, head_bytes=0, head_flops=0, attention=())
    return EngineInfo(
        model="fake",
        architecture="Fake",
        device="cpu",
        dtype="float32",
        kv_cache_dtype="float32",
        attention="fake",
        linear="fake",
        forward="fake",
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        max_model_len=min(max_model_len, num_blocks * block_size),
        block_size=block_size,
        num_blocks=num_blocks,
        eos_token_ids=(EOS,),
        weights_fingerprint="0123",
        weight_bytes=0,
        kv_cache_bytes=0,
        kv_bytes_per_token=0,
        kv_groups=kv_groups,
        num_state_slots=num_state_slots,
        num_state_checkpoints=num_state_checkpoints,
        load_s=0.0,
        size=size,
        draft_size=size if has_draft_weights or draft_kv_bytes else None,
        draft_kv_bytes=draft_kv_bytes,
        has_head=has_head,
        ceilings=Ceilings(read_bytes_per_s=1e15, flops_per_s=1e15),  # no fake step is faster
    )


def fake_engine(
    num_blocks: int = 64,
    block_size: int = 4,
    clock: Callable[[], float] = time.monotonic,
    new_drafter: Callable[[], Drafter] = PromptLookup,
    kv_groups: KVGroups = ONE_GROUP,
    **settings: Any,
) -> Engine:
    """The real engine and scheduler over a FakeRunner."""
    config = EngineConfig(model="fake", block_size=block_size, **{"num_speculative_tokens": 0, **settings})
    info = fake_info(num_blocks, block_size, kv_groups=kv_groups)
    runner = FakeRunner(block_size, groups=kv_groups)
    return assemble(config, info, runner, clock=clock, new_drafter=new_drafter)


def batches(engine: Engine) -> list[Batch]:
    """Returns all batches that a fake engine ran."""
    runner = engine._runner
    assert isinstance(runner, FakeRunner)
    return runner.batches


def add(engine: Engine, request_id: str, prompt: Sequence[int] = (1, 2, 3), **fields: Any) -> None:
    params = {name: fields.pop(name) for name in SamplingParams.__struct_fields__ if name in fields}
    sampling = SamplingParams(**{"max_tokens": 5, "ignore_eos": True, **params})
    engine.add_request(adding(request_id, prompt, sampling, **fields))


def expected_tokens(prompt: Sequence[int], max_tokens: int, seed: int = 0) -> list[int]:
    context = list(prompt)
    for _ in range(max_tokens):
        context.append(next_token(context, seed))
    return context[len(prompt) :]


def run_to_end(engine: Engine, max_steps: int = 10_000) -> dict[str, list[RequestUpdate]]:
    """Returns every request's updates; fails if the engine does not come to rest."""
    updates: dict[str, list[RequestUpdate]] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return updates
        for update in engine.step().updates:
            updates.setdefault(update.request_id, []).append(update)
    raise AssertionError("the engine still has work")


def tokens_of(updates: Sequence[RequestUpdate]) -> list[int]:
    return [token_id for update in updates for token_id in update.token_ids]
