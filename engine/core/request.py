"""One request inside the engine: its tokens, its one counter of progress, its blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from engine.core.draft import Drafter, NoDrafts
from engine.core.sampling_params import SamplingParams


class RequestStatus(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """How a request ended; every request ends in exactly one of these ways."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Constraint(Protocol):
    """Which tokens may come next; owned by its request and gone with it."""

    def allowed_tokens(self, output_token_ids: Sequence[int], draft: Sequence[int]) -> tuple[bytes, ...]:
        """After the output, then after each token of its `draft` up to the first that may not come: one bit per token
        id, lowest bit first."""

    def forced_tokens(self, output_token_ids: Sequence[int], max_tokens: int) -> Sequence[int]:
        """The likeliest way to spell the text that must come next."""

    @property
    def is_exhausted(self) -> bool:
        """Whether no token may come now because it took more than it may, and not by what it says."""


@dataclass(slots=True, eq=False)
class Request:
    """Mutable, owned by the scheduler. Positions [0, num_computed_tokens) have KV in `block_table`."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_s: float
    priority: int = 0
    """Lower runs first of its tenant's; equal priorities run in order of arrival."""
    tenant: str = ""
    weight: float = 1.0
    """Of its tenant, against the other tenants' weights."""
    cache_salt: str = ""
    """Requests share prefix-cache blocks only with requests of the same salt."""
    output_token_ids: list[int] = field(default_factory=list)
    """Not empty at the start for a request that resumes after an engine restart."""

    constraint: Constraint | None = None
    """What `params.grammar` was compiled to; None while any token may come."""
    may_speculate: bool = False
    """What it says next, by itself or with the draft weights."""
    drafter: Drafter = field(default_factory=NoDrafts)
    """Guesses that of its text."""
    draft_acceptance: float | None = None
    """That a guess of the draft weights is right; None before the first."""
    number: int = 0
    """Of its arrival, given by the scheduler."""
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the first full blocks, as far as anyone asked for them; owned by the prefix cache."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when first scheduled."""
    first_scheduled_s: float | None = None
    num_prefill_chunks: int = 0
    num_preemptions: int = 0
    is_announced: bool = False
    """Whether its FirstTokenInfo was sent."""
    prompt_logprobs: list[bytes] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, int]:
        """Lower runs first."""
        return self.priority, self.number

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def needs_prefill(self) -> bool:
        """A question, not a state: more than one token lacks KV, or nothing was generated yet."""
        return self.num_uncomputed_tokens > 1 or not self.output_token_ids

    @property
    def max_draft_tokens(self) -> int:
        """Tokens that it may say beside the one that each step brings."""
        return self.params.max_tokens - len(self.output_token_ids) - 1

    @property
    def scores_prompt(self) -> bool:
        """Whether its prompt tokens' log-probabilities are still to be told."""
        return self.params.prompt_logprobs is not None and not self.output_token_ids

    def token_ids(self, start: int, end: int) -> list[int]:
        """The tokens at positions [start, end) of prompt followed by output, in O(end - start)."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt]
