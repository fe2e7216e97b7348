"""Answers of the Python API, with vLLM's names, and how they grow from the engine's outputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core.batch import TokenLogprobs
from engine.core.outputs import RequestOutput as EngineOutput
from engine.core.stats import RequestTimings
from server.core.tokenizer_protocol import Tokenizer, token_name

__all__ = ["AnswerBuilder", "CompletionOutput", "Logprob", "RequestOutput"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability under the model's own distribution, before temperature and penalties."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    decoded_token: str


Logprobs = dict[int, Logprob]
"""Token id -> its log-probability: of the token at one position, and of the most likely ones there."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt, so far."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    """Sum of the tokens' log-probabilities; None unless `logprobs` were asked for."""
    logprobs: tuple[Logprobs, ...] | None
    finish_reason: str | None
    """`stop`, `length`, or None while it grows."""
    stop_reason: int | str | None
    """The stop token or stop string that ended it; None for the model's own end."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its answers."""

    request_id: str
    prompt: str | None
    """The text that was tokenized; None where token ids were given."""
    prompt_token_ids: list[int]
    prompt_logprobs: tuple[Logprobs | None, ...] | None
    outputs: list[CompletionOutput]
    finished: bool
    seed: int
    """The seed of the first answer, given or drawn."""
    num_cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""
    timings: tuple[RequestTimings | None, ...]
    """Queue, prefill and decode of each answer, in seconds; None before its first token."""


@dataclass(slots=True)
class AnswerBuilder:
    """Joins the engine's outputs for one answer."""

    index: int
    tokenizer: Tokenizer
    wants_logprobs: bool
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    timings: RequestTimings | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, output: EngineOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        for score in output.logprobs:
            self.logprobs.append(_by_id(score, self.tokenizer))
            self.cumulative_logprob += score.logprob
        if output.prompt_logprobs is not None:
            scores = output.prompt_logprobs
            self.prompt_logprobs = tuple(None if each is None else _by_id(each, self.tokenizer) for each in scores)
        self.num_cached_tokens = output.num_cached_tokens
        self.timings = output.timings or self.timings
        self.finish_reason = None if output.finish_reason is None else output.finish_reason.value
        self.stop_reason = output.stop_reason

    def so_far(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=tuple(self.token_ids),
            cumulative_logprob=self.cumulative_logprob if self.wants_logprobs else None,
            logprobs=tuple(self.logprobs) if self.wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


def is_finished(answers: Sequence[AnswerBuilder]) -> bool:
    return all(answer.finish_reason is not None for answer in answers)


def _by_id(score: TokenLogprobs, tokenizer: Tokenizer) -> Logprobs:
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(score.top, start=1)]
    return {
        token_id: Logprob(logprob, rank, token_name(tokenizer, token_id))
        for token_id, logprob, rank in [*ranked, (score.token_id, score.logprob, score.rank)]
    }
