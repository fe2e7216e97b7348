"""The batch that the scheduler hands to the model runner, and the output it gets back: plain frozen data, no torch."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from engine.core.sampling_params import SamplingParams


class Phase(StrEnum):
    """Prefill computes prompts, bound by compute; decode adds a token to each sequence, bound by memory bandwidth."""

    PREFILL = "prefill"
    DECODE = "decode"


class Direction(StrEnum):
    """LOAD copies from the KV store into memory, STORE the other way round."""

    LOAD = "load"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """A full block to be copied between the KV cache and the KV store, beside the steps. Until it ends, the block is
    held for it: no step writes the block, and none reads one that is being loaded."""

    direction: Direction
    block_id: int
    name: bytes
    """What names the block in the store: the hash of its tokens and of all before them, and its group of layers."""
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateTransfer:
    """A copy of recurrent states, made after a full block, to be copied between memory and the KV store, beside the
    steps. Until it ends, no step writes the slot, and none reads one that is being loaded."""

    direction: Direction
    slot: int
    block_hash: bytes
    """Hash of the block after which the states are."""
    token_ids: tuple[int, ...]
    """Tokens of that block."""

    @property
    def name(self) -> bytes:
        return name_of_states(self.block_hash)


Transfer = BlockTransfer | StateTransfer


def name_of_states(block_hash: bytes) -> bytes:
    """Returns what names, in the KV store, the states after the block of this hash: the hash of no block."""
    return hashlib.sha256(b"states" + block_hash).digest()


@dataclass(frozen=True, slots=True)
class EndedTransfer:
    """How a transfer ended. A block or a slot whose loading did not succeed holds nothing."""

    transfer: Transfer
    succeeded: bool
    seconds: float
    """What it took, without its time in the queue."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step: the tokens at positions [start, start + len(token_ids)) get their KV.

    `block_table` holds every position below start + len(token_ids). `prompt_token_ids` and `output_token_ids` are
    the request's own growing lists, not copies: read them within the step and never change them.
    """

    request_id: str
    token_ids: Sequence[int]
    start: int
    block_table: tuple[int, ...]
    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    samples: bool
    """Whether a token is sampled from the logits at the last position, and from those before each draft token (False
    for all but the last prefill chunk)."""
    allowed_tokens: tuple[bytes, ...] = ()
    """For each position that samples, a mask of the tokens allowed there: one bit per token id, lowest bit first. Empty
    if every token is allowed."""
    num_drafts: int = 0
    """Number of draft tokens at the end of `token_ids`: each is accepted if it is the token sampled at its position."""
    num_wanted: int = 0
    """Draft length: number of tokens that the draft model is to propose before the step. `block_table` holds their
    positions, too."""
    draft_span: tuple[int, int] | None = None
    """Positions [start, end) of its own tokens that a draft model with KV of its own computes in this step: where it
    was behind, and the step's own. None if there are none, or no such model."""
    state_slot: int | None = None
    """Slot of its recurrent states, which are those after position `start` - 1; None for models without any."""
    restored_slot: int | None = None
    """Slot from which these states are to be copied first."""
    saved_slot: int | None = None
    """Slot to which the states after the step are to be copied at last."""
    scores_prompt: bool = False
    """Whether every prompt token after the first needs its log-probability."""
    adapter: int | None = None
    """Number of the adapter that its tokens are computed with; None for the model as it is."""
    window_tables: tuple[tuple[int, ...], ...] = ()
    """The block table of each other group of layers; `block_table` is that of the first. For positions that no token
    of the step sees in a group, any block stands there."""
    block_copies: tuple[tuple[int, int], ...] = ()
    """Blocks that are to be copied first, each with the block of its own to which."""

    @property
    def end(self) -> int:
        """The context length after this step, draft tokens included; also the position of the last token that is
        sampled, if one is."""
        return self.start + len(self.token_ids)

    @property
    def draft(self) -> Sequence[int]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work, all of one phase, and the transfers to begin before it. It has no requests if none can run."""

    phase: Phase
    requests: tuple[ScheduledRequest, ...]
    transfers: tuple[Transfer, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.requests)

    @property
    def num_drafts(self) -> int:
        return sum(request.num_drafts for request in self.requests)

    @property
    def wants_drafts(self) -> bool:
        """Whether the draft model runs before the step; in a prefill step it runs within."""
        return self.phase is Phase.DECODE and any(
            request.num_wanted > request.num_drafts or request.draft_span for request in self.requests
        )


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities at one position, under the model's own distribution (before penalties and temperature).

    A million of them may wait for a reader, so the garbage collector, whose pauses hold up all streams, does not look
    at them: what consists of numbers is in no cycle.
    """

    token_id: int
    logprob: float
    rank: int
    """Rank of the token by probability, 1 for the most likely one."""
    top_ids: tuple[int, ...] = ()
    """The most likely tokens, best first. They, and their log-probabilities, are tuples of numbers, which the garbage
    collector leaves alone, and take half of the memory of pairs."""
    top_logprobs: tuple[float, ...] = ()

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """(token id, log-probability) of the most likely tokens, best first."""
        return tuple(zip(self.top_ids, self.top_logprobs, strict=True))


@dataclass(frozen=True, slots=True)
class RequestStepOutput:
    """The runner's output for one `ScheduledRequest`.

    `token_ids` is empty unless the request samples, or if no token is left that it may sample; else it has one token,
    and one more for each accepted draft token. `prompt_logprobs`, if requested, has one entry for each computed
    position whose next token is a prompt token (position p scores token p + 1).
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    embedding: bytes = b""
    """Embedding of the whole prompt, if requested; comes with the prompt's last chunk."""
    is_finite: bool = True
    """If no token could be sampled: whether the logits were finite before the request's own options changed them."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The runner's output for a `Batch`, in the batch's order."""

    requests: tuple[RequestStepOutput, ...]
    experts_read: float | None = None
    """Share of the model's experts whose weights the step read, over all layers; None where that is not counted."""
