"""The requests of a file as plain data, and the stream of requests that a run makes of them."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from loadtest.workload import Conversation, Prompt, PromptSource, RequestSpec, Shape

TRACE_BLOCK_TOKENS = 512  # of Mooncake's traces: the tokens that one hash id stands for
_MAX_BLOCKS_KEPT = 4096


@dataclass(frozen=True)
class TracedPrompt:
    """A prompt of which only the length and the identity of its blocks is known: equal ids are equal tokens."""

    num_tokens: int
    block_ids: tuple[int, ...] = ()  # empty: the prompt shares nothing with others


@dataclass(frozen=True)
class Entry:
    """One request of a file."""

    prompt: str | Conversation | TracedPrompt
    max_tokens: int | None = None  # None: the file does not say
    arrival_s: float | None = None


@dataclass(frozen=True)
class Dataset:
    """The requests of a file, in its order; either all of them have an arrival time or none has."""

    file: str
    entries: tuple[Entry, ...]
    num_skipped: int = 0  # conversations without a question and its answer

    @property
    def has_arrivals(self) -> bool:
        return self.entries[0].arrival_s is not None

    @property
    def is_traced(self) -> bool:
        """Whether prompts are drawn here, as the file has only their lengths."""
        return any(isinstance(entry.prompt, TracedPrompt) for entry in self.entries)

    def offsets_s(self, speedup: float) -> Iterator[float]:
        """Yields when each request is due, in seconds after the first."""
        began_s = self.entries[0].arrival_s or 0.0
        for entry in self.entries:
            yield ((entry.arrival_s or 0.0) - began_s) / speedup


def dataset_stream(dataset: Dataset, shape: Shape, seed: str, is_salted: bool) -> Iterator[RequestSpec]:
    """Yields the file's requests once, in its order. Salted, each prompt begins with a mark of this seed, so that no
    prefix cache knows it from another run, and what prompts share within the run stays shared."""
    salt = f"[{random.Random(f'{seed}/salt').getrandbits(32):08x}] " if is_salted else ""
    trace = _TraceSource(shape, seed)
    for entry in dataset.entries:
        prompt = trace.prompt(entry.prompt) if isinstance(entry.prompt, TracedPrompt) else _marked(entry.prompt, salt)
        yield RequestSpec("all", prompt, entry.max_tokens or shape.output_len)


def _marked(prompt: str | Conversation, salt: str) -> str | Conversation:
    if isinstance(prompt, str):
        return salt + prompt
    first, *others = prompt.messages
    return replace(prompt, messages=({**first, "content": salt + (first.get("content") or "")}, *others))


class _TraceSource:
    """Draws the prompts of a trace: a block's tokens are a function of the seed and its id."""

    def __init__(self, shape: Shape, seed: str) -> None:
        self._alone = PromptSource(shape, f"{seed}/alone")
        self._block = lru_cache(_MAX_BLOCKS_KEPT)(
            lambda block_id: PromptSource(shape, f"{seed}/{block_id}").draw(TRACE_BLOCK_TOKENS)
        )

    def prompt(self, traced: TracedPrompt) -> Prompt:
        if not traced.block_ids:
            return self._alone.render(self._alone.draw(traced.num_tokens))
        ids = [token for block_id in traced.block_ids for token in self._block(block_id)]
        return self._alone.render(ids[: traced.num_tokens])
