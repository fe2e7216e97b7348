"""Workloads: endless streams of requests, drawn from a seed. Nothing here knows HTTP or time."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

# Common English words: about one token each for most tokenizers; the server's `usage` says how many it really were.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue "
    "side kind head house service friend father power hour game line end member law car city community "
    "name president team minute idea kid body information back parent face others level office door "
    "health person art war history party result change morning reason research"
).split()

Message = Mapping[str, Any]  # as /v1/chat/completions writes it


@dataclass(frozen=True)
class Conversation:
    """Messages and tools, as /v1/chat/completions writes them."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


Prompt = list[int] | str | Conversation


class WorkloadKind(StrEnum):
    """Choices of `--workload`."""

    RANDOM = "random"
    SHARED_PREFIX = "shared-prefix"
    LONG_AMONG_DECODERS = "long-among-decoders"
    AGENT_SESSIONS = "agent-sessions"


@dataclass(frozen=True)
class RequestSpec:
    """One request to send. Statistics are kept for each `group` of requests."""

    group: str
    prompt: Prompt
    max_tokens: int
    turn: int | None = None  # of an agent's session, from 1 on


@dataclass(frozen=True)
class Shape:
    """Lengths of prompts and outputs, in tokens (with `is_text`: prompts in words)."""

    kind: WorkloadKind = WorkloadKind.RANDOM
    prompt_len: int = 128
    output_len: int = 128
    prefix_len: int = 0  # of shared-prefix: the part of prompt_len that all prompts have in common
    long_prompt_len: int = 2048
    long_output_len: int = 16
    num_turns: int = 8  # of an agent's session
    system_len: int = 512  # of the system prompt that all sessions share
    num_tools: int = 4  # that all sessions share
    vocab_size: int = 1000
    is_text: bool = False


class PromptSource:
    """Draws ids, which `render` turns into a prompt. The same seed draws the same ids."""

    def __init__(self, shape: Shape, seed: str) -> None:
        self._random = random.Random(seed)
        self._is_text = shape.is_text
        self._ids = range(len(_WORDS) if shape.is_text else shape.vocab_size)

    def draw(self, num: int) -> list[int]:
        return self._random.choices(self._ids, k=num)

    def render(self, ids: list[int]) -> list[int] | str:
        return " ".join(_WORDS[i] for i in ids) if self._is_text else ids


def request_stream(shape: Shape, seed: str) -> Iterator[RequestSpec]:
    """Yields the requests of the main load: all but the long prompts of long-among-decoders."""
    source = PromptSource(shape, seed)
    group = "decoders" if shape.kind is WorkloadKind.LONG_AMONG_DECODERS else "all"
    prefix_len = shape.prefix_len if shape.kind is WorkloadKind.SHARED_PREFIX else 0
    prefix = source.draw(prefix_len)
    while True:
        prompt = source.render(prefix + source.draw(shape.prompt_len - prefix_len))
        yield RequestSpec(group, prompt, shape.output_len)


def long_stream(shape: Shape, seed: str) -> Iterator[RequestSpec]:
    """Yields the long prompts of long-among-decoders."""
    source = PromptSource(shape, f"{seed}/long")
    while True:
        yield RequestSpec("long", source.render(source.draw(shape.long_prompt_len)), shape.long_output_len)


def poisson_offsets(rate_per_s: float, seed: str) -> Iterator[float]:
    """Yields when the requests of an open loop are due, in seconds after its start: a Poisson process."""
    source = random.Random(f"{seed}/arrivals")
    due_s = 0.0
    while True:
        due_s += source.expovariate(rate_per_s)
        yield due_s
