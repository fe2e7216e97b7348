"""An engine without a model: tokens by rule, at a pace and with failures that a test chooses."""

import asyncio
import struct
import zlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from hashlib import sha256

from engine.client.observer import EngineObserver, NullObserver, observe_output
from engine.core.adapters import AdapterInfo
from engine.core.batch import Phase, TokenLogprobs
from engine.core.cache_steering import CachedPrefixes
from engine.core.config import EngineInfo
from engine.core.errors import (
    EngineFailedError,
    EngineRestartingError,
    EngineUnavailableError,
    OverloadedError,
    RequestAbortedError,
    TwostepError,
)
from engine.core.generation_request import GenerationRequest, Tenant
from engine.core.machine import AttentionSize, Ceilings, ModelSize
from engine.core.messages import RequestState
from engine.core.outputs import RequestOutput
from engine.core.request import FinishReason
from engine.core.request_snapshot import RequestSnapshot
from engine.core.request_validation import check_request
from engine.core.stats import PoolStats, QueueStats, RequestTimings, StepStats
from engine.text.detokenizer import IncrementalDetokenizer
from tests.server.byte_tokenizer import EOS, VOCAB_SIZE, ByteTokenizer

NUM_BLOCKS = 64
INFO = EngineInfo(
    model="fake/model",
    architecture="FakeForCausalLM",
    device="cpu",
    dtype="float32",
    kv_cache_dtype="float32",
    attention="none",
    linear="none",
    forward="none",
    vocab_size=VOCAB_SIZE,
    hidden_size=3,
    max_model_len=512,
    block_size=16,
    num_blocks=NUM_BLOCKS,
    eos_token_ids=(EOS,),
    weights_fingerprint="0123",
    weight_bytes=2**20,
    kv_cache_bytes=2**20,
    kv_bytes_per_token=2**10,
    load_s=0.1,
    size=ModelSize(
        layer_bytes=2**20,
        layer_flops=2**20,
        head_bytes=2**20,
        head_flops=0,
        attention=(AttentionSize(None, 2**10, 2**10),),
    ),
    ceilings=Ceilings(30e9, 2e12),
)
STATE = RequestState("", was_scheduled=True, num_computed_tokens=5, num_cached_tokens=1, num_blocks=2)


def letters(request: GenerationRequest, position: int) -> int:
    """A letter that depends on the prompt, the seed (unless greedy) and the position, and on nothing else."""
    seed = 0 if request.params.is_greedy else request.params.seed
    prompt = ",".join(map(str, request.prompt_token_ids))
    return ord("a") + zlib.crc32(f"{prompt}/{seed}/{position}".encode()) % 26


def saying(text: str, then: int = EOS) -> Callable[[GenerationRequest, int], int]:
    """Returns a rule that generates the text and then the token `then`."""
    data = text.encode()
    return lambda _, position: data[position] if position < len(data) else then


def embedding(request: GenerationRequest) -> bytes:
    """Returns an embedding of three numbers that depend on the prompt."""
    ids = request.prompt_token_ids
    return struct.pack("<3f", len(ids), sum(ids) / 4, ids[-1])


@dataclass
class FakeAdapters:
    """Implements `AdapterClient`: any directory has an adapter, but for those that `refusals` names."""

    loaded: dict[str, AdapterInfo] = field(default_factory=dict)
    refusals: dict[str, TwostepError] = field(default_factory=dict)

    async def load(self, name: str, path: str) -> AdapterInfo:
        if path in self.refusals:
            raise self.refusals[path]
        self.loaded[name] = AdapterInfo(path, sha256(path.encode()).hexdigest(), rank=8, num_bytes=2**20)
        return self.loaded[name]

    def unload(self, name: str) -> None:
        del self.loaded[name]


@dataclass
class FakeEngine:
    """Implements `EngineClient`. Times are invented: 1 ms of queue, 2 ms of prefill, 0.5 ms between tokens."""

    observer: EngineObserver = field(default_factory=NullObserver)
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    rule: Callable[[GenerationRequest, int], int] = letters
    delay_s: float = 0.0
    """Real time before each token."""
    hold_at: int | None = None
    """Each sequence waits before this token until a test sets another value."""
    refusal: TwostepError | None = None
    """Raised by `generate` before its first output."""
    fail_at: int | None = None
    """Each sequence fails before this token."""
    end_early: FinishReason | None = None
    """The finish reason of each sequence at EOS."""
    health: TwostepError | None = None
    is_full: bool = False
    """`check_admission` refuses with OverloadedError."""
    is_restarting: bool = False
    """`check_admission` refuses with EngineRestartingError."""
    last_tenant_checked: Tenant | None = None
    """The tenant that `check_admission` was last asked about."""
    num_cached_tokens: int = 0
    requests: list[GenerationRequest] = field(default_factory=list)
    """All admitted requests."""
    live: list["_Sequence"] = field(default_factory=list)
    state: RequestState | None = STATE
    """State that `inspect` reports of each live sequence."""
    finished: list[FinishReason] = field(default_factory=list)
    is_ready: bool = True
    info: EngineInfo = INFO
    last_stats: StepStats | None = None
    num_live: int = 0
    max_live_seen: int = 0
    resets: list[bool] = field(default_factory=list)
    """Arguments of the calls of `reset_prefix_cache`."""
    cached: dict[str, list[CachedPrefixes]] = field(default_factory=dict)
    """What `cached_prefixes` returns, by tenant."""
    drops: list[tuple[str, str | None]] = field(default_factory=list)
    """Arguments of the calls of `drop_prefixes`."""
    num_settled: int = 0
    """Calls of `settle`."""
    num_holding: int = 0
    """Sequences that wait at `hold_at`."""
    adapters: "FakeAdapters" = field(default_factory=lambda: FakeAdapters())

    def reset(self) -> None:
        """Resets all but the observer and the tokenizer."""
        self.__dict__.update(FakeEngine(self.observer, self.tokenizer).__dict__)

    @property
    def queue_stats(self) -> QueueStats:
        return QueueStats(self.num_live, num_waiting_tokens=7, predicted_wait_s=0.5)

    async def settle(self, timeout_s: float) -> None:
        self.num_settled += 1

    def check_admission(self, tenant: Tenant) -> None:
        self.last_tenant_checked = tenant
        if self.is_full:
            raise OverloadedError("All places are taken; try again later.", retry_after_s=2.1)
        if self.is_restarting:
            raise EngineRestartingError("The engine is being restarted.", retry_after_s=7.2)

    def check_health(self) -> None:
        if self.health is not None:
            raise self.health

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[RequestOutput, None]:
        if self.refusal is not None:
            raise self.refusal
        check_request(self.info, request.prompt_token_ids, request.params)
        self.requests.append(request)
        self._count(1)
        sequence = _Sequence(request, self)
        self.live.append(sequence)
        reason = FinishReason.ABORT
        try:
            while sequence.finish_reason is None:
                await self._wait_for(sequence)
                output = sequence.step()
                reason = output.finish_reason or reason
                gap_s = 0.0005 if len(sequence.token_ids) > 1 else None
                observe_output(self.observer, request, output, gap_s)
                yield output
        except TwostepError:
            reason = FinishReason.ERROR
            raise
        finally:
            self.live.remove(sequence)
            self._count(-1)
            self.finished.append(reason)
            self.observer.on_finish(reason, sequence.timings() if sequence.token_ids else None)

    async def inspect(self, tenant: str, client_request_id: str | None, limit: int) -> list[RequestSnapshot]:
        return [sequence.view() for sequence in self._group(tenant, client_request_id)[:limit]]

    async def cached_prefixes(self, tenant: str) -> list[CachedPrefixes]:
        return self.cached.get(tenant, [])

    def drop_prefixes(self, tenant: str, key: str | None) -> None:
        self.drops.append((tenant, key))

    def reset_prefix_cache(self, clears_store: bool) -> None:
        self.resets.append(clears_store)

    def abort(self, tenant: str, client_request_id: str) -> bool:
        aborted = self._group(tenant, client_request_id)
        for sequence in aborted:
            sequence.is_aborted = True
        return bool(aborted)

    def _group(self, tenant: str, client_request_id: str | None) -> list["_Sequence"]:
        own = [sequence for sequence in self.live if sequence.request.tenant == tenant]
        return [sequence for sequence in own if client_request_id in (None, sequence.request.client_request_id)]

    def stop(self) -> None:
        self.health = EngineUnavailableError("The engine was stopped.")

    async def _wait_for(self, sequence: "_Sequence") -> None:
        position = len(sequence.token_ids)
        await asyncio.sleep(self.delay_s)  # yields even for 0 s, since real tokens come from another process
        if self.hold_at == position:
            self.num_holding += 1
        while self.hold_at == position and self.health is None and not sequence.is_aborted:
            await asyncio.sleep(0.002)
        if sequence.is_aborted and not position:
            raise RequestAbortedError("The request was aborted before its first token.")
        if self.health is not None:
            raise self.health
        if self.fail_at == position:
            raise EngineFailedError("The engine failed on this request.", "secret detail")

    def _count(self, change: int) -> None:
        self.num_live += change
        self.max_live_seen = max(self.max_live_seen, self.num_live)
        pool = PoolStats(NUM_BLOCKS - self.num_live, self.num_live, 0)
        self.last_stats = StepStats(Phase.DECODE, self.num_live, 1, 0.001, 0.001, self.num_live, 0, pool, 0, 0, 0)
        self.observer.on_step(self.last_stats)


class _Sequence:
    def __init__(self, request: GenerationRequest, engine: FakeEngine) -> None:
        self.request = request
        self.is_aborted = False
        self._engine = engine
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        params = request.params
        self._detokenizer = IncrementalDetokenizer(
            engine.tokenizer,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
            shown_token_ids=params.shown_token_ids,
        )

    def timings(self) -> RequestTimings:
        gaps = (0.0005,) * (len(self.token_ids) - 1)
        return RequestTimings(queue_s=0.001, prefill_s=0.002, inter_token_s=gaps, prefill_chunks=1)

    def view(self) -> RequestSnapshot:
        num_tokens = len(self.token_ids)
        return RequestSnapshot(
            client_request_id=self.request.client_request_id,
            arrival_s=self.request.arrival_s,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_output_tokens=num_tokens,
            queue_s=0.001 if num_tokens else None,
            ttft_s=0.003 if num_tokens else None,
            left_s=0.0005 * (self.request.params.max_tokens - num_tokens) if num_tokens > 1 else None,
            state=self._engine.state,
        )

    def step(self) -> RequestOutput:
        params = self.request.params
        is_first = not self.token_ids
        makes_token = params.max_tokens and not self.is_aborted
        new_ids = (self._engine.rule(self.request, len(self.token_ids)),) if makes_token else ()
        if is_first and self.request.given_token_ids:
            new_ids = self.request.given_token_ids
        self.token_ids += new_ids
        text, stop_reason = self._advance(new_ids)
        if self.finish_reason is None and (self.is_aborted or len(self.token_ids) == params.max_tokens):
            self.finish_reason = FinishReason.LENGTH
            stop_reason = "abort" if self.is_aborted else None
            text += self._detokenizer.flush()
        return RequestOutput(
            text=text,
            token_ids=new_ids,
            logprobs=() if params.logprobs is None else tuple(score(each, params.logprobs) for each in new_ids),
            prompt_logprobs=self._prompt_logprobs() if is_first else None,
            embedding=embedding(self.request) if params.returns_embedding else b"",
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=self._engine.num_cached_tokens,
            num_output_tokens=len(self.token_ids),
            timings=self.timings() if is_first or self.finish_reason else None,
            finish_reason=self.finish_reason,
            stop_reason=stop_reason,
        )

    def _advance(self, new_ids: tuple[int, ...]) -> tuple[str, int | str | None]:
        """Returns the text of the new tokens and the stop reason."""
        params, text = self.request.params, ""
        for token_id in new_ids:
            is_eos = token_id == EOS and not params.ignore_eos
            if (is_eos or token_id in params.stop_token_ids) and len(self.token_ids) > params.min_tokens:
                self.finish_reason = self._engine.end_early or FinishReason.STOP
                return self._detokenizer.flush(), None if is_eos else token_id
            text += self._detokenizer.append(token_id)
            if self._detokenizer.stop_string is not None:
                self.finish_reason = FinishReason.STOP
                return text, self._detokenizer.stop_string
        return text, None

    def _prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        count = self.request.params.prompt_logprobs
        if count is None:
            return None
        return (None, *(score(token_id, count) for token_id in self.request.prompt_token_ids[1:]))


def score(token_id: int, count: int) -> TokenLogprobs:
    """Returns a token's logprobs. Ids nearer to "a" are likelier; the token itself need not be among the top ones."""
    ids, logprobs = tuple(ord("a") + rank for rank in range(count)), tuple(-0.5 * (rank + 1) for rank in range(count))
    rank = abs(token_id - ord("a")) + 1
    return TokenLogprobs(token_id, -0.5 * rank, rank, ids, logprobs)
