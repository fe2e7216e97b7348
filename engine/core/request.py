"""One request inside the engine: what was asked, its progress (`num_computed_tokens`) and its blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from engine.core.draft import Drafter, NoDrafts
from engine.core.generation_request import GenerationRequest


class RequestStatus(StrEnum):
    WAITING = "waiting"
    LOADING = "loading"
    """Out of the queue until its prefix is read from the KV store."""
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """How a request ended; every request ends in exactly one of these ways."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Constraint(Protocol):
    """The state of one request's grammar: which tokens may come next. Its request owns it."""

    def allowed_tokens(self, output_token_ids: Sequence[int], draft: Sequence[int]) -> tuple[bytes, ...]:
        """Returns the mask of allowed tokens after the output, then the masks after each token of `draft`, up to the
        first draft token that is not allowed. A mask has one bit per token id, lowest bit first."""

    def forced_tokens(self, output_token_ids: Sequence[int], max_tokens: int) -> Sequence[int]:
        """Returns the likeliest tokens, at most `max_tokens`, of the text that the grammar forces next."""

    @property
    def is_exhausted(self) -> bool:
        """Whether no token is allowed because the grammar reached its limit of time or states, not by its rules."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """The adapter of a request."""

    digest: str
    """Hash of its content, which the keys of cached blocks cover."""
    number: int
    """Number of the adapter in batches, while it is loaded."""


@dataclass(slots=True, eq=False)
class Request:
    """A request's progress, which the scheduler owns and changes, beside what was asked, which never changes. Positions
    [0, num_computed_tokens) have KV in `block_table`."""

    request_id: str
    asked: GenerationRequest
    adapter: LoadedAdapter | None = None
    """The adapter that it runs with; None for the model as it is."""
    num_announced_tokens: int = 0
    """Its first tokens of which another server says that it stored their blocks; 0 once they are read."""
    output_token_ids: list[int] = field(default_factory=list)
    """Tokens generated so far. Not empty at the start for a request that resumes after an engine restart."""

    constraint: Constraint | None = None
    """The compiled `asked.params.grammar`; None if any token is allowed."""
    may_speculate: bool = False
    """Whether draft tokens may be proposed for it, by `drafter` or by the draft model."""
    drafter: Drafter = field(default_factory=NoDrafts)
    """Proposes draft tokens from its prompt, output and grammar."""
    draft_acceptance: float | None = None
    """Acceptance rate of the draft model's tokens for it; None before the first."""
    number: int = 0
    """Its place in the order of arrival, given by the scheduler."""
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_drafted_tokens: int = 0
    """Positions [0, num_drafted_tokens) have the draft model's own KV, too, if it has any."""
    block_table: list[int] = field(default_factory=list)
    window_tables: list[list[int]] = field(default_factory=list)
    """The block tables of the other groups of layers, if there are several: of those that see a window."""
    num_hidden_blocks: int = 0
    """Blocks at the beginning that no later token sees in windowed layers. They were given back: in their places, in
    the tables of these layers, stands the block behind them."""
    state_slot: int | None = None
    """Slot of its recurrent states while it runs; None for models without any."""
    restored_slot: int | None = None
    """Slot of the states that its next step goes on from, by copying them to `state_slot`; None if by then they are
    there."""
    block_copies: tuple[tuple[int, int], ...] = ()
    """Cached blocks, held for it, that its next step copies first, each with the block of its own to which."""
    saved_slot: int | None = None
    """Slot to which the step at hand copies its states."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of its first full blocks, as far as they were needed; the prefix cache computes them."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when first scheduled."""
    num_loaded_tokens: int = 0
    """Tokens read for it from the KV store, and verified, before it ran."""
    num_loads: int = 0
    """How often its prefix was read from the KV store since it last ran."""
    first_scheduled_s: float | None = None
    num_prefill_chunks: int = 0
    num_preemptions: int = 0
    is_stalled: bool = False
    """Whether its reader has stopped reading: it makes room for all others. `FairQueue.set_stalled` changes it."""
    turn_start: int = 0
    """Output tokens that it had when it last got its place among the running."""
    is_announced: bool = False
    """Whether its FirstTokenInfo was sent."""
    prompt_logprobs: list[bytes] = field(default_factory=list)
    """Log-probabilities of its prompt tokens so far, as `engine.core.prompt_logprobs` packs them."""

    @property
    def order(self) -> tuple[int, int]:
        """Sort key among running requests: the lowest comes first."""
        return self.asked.priority, self.number

    @property
    def num_tokens(self) -> int:
        return len(self.asked.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that it holds, in all tables together."""
        num_hidden = self.num_hidden_blocks * max(1, len(self.window_tables))
        return len(self.block_table) + sum(map(len, self.window_tables)) - num_hidden

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def needs_prefill(self) -> bool:
        """Whether more than one token lacks KV, or nothing was generated yet. Computed on demand, not a state."""
        return not self.output_token_ids or self.num_uncomputed_tokens > 1

    @property
    def max_draft_tokens(self) -> int:
        """Maximum number of draft tokens that can be output beside the one token that each step samples anyway."""
        return self.asked.params.max_tokens - len(self.output_token_ids) - 1

    @property
    def scores_prompt(self) -> bool:
        """Whether its prompt tokens' log-probabilities are requested and not yet complete."""
        return self.asked.params.prompt_logprobs is not None and not self.output_token_ids

    def token_ids(self, start: int, end: int) -> list[int]:
        """The tokens at positions [start, end) of prompt followed by output, in O(end - start)."""
        num_prompt = len(self.asked.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        if end <= num_prompt:
            return self.asked.prompt_token_ids[start:end]
        return self.asked.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt]
