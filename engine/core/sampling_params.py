"""Sampling parameters of one request, validated when they are made."""

import msgspec

from engine.core.errors import InvalidParameterError
from engine.core.thinking_budget import ThinkingBudget

MAX_LOGPROBS = 100
MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
GREEDY_BELOW = 1e-5  # temperatures that float32 logits cannot be divided by


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of one generated sequence. Values are refused with `InvalidParameterError`, never adjusted.

    The filters apply in this order: logit_bias, allowed ids and bad words, penalties, temperature, top_k, top_p, min_p.
    """

    max_tokens: int = 16
    """Tokens to generate at most. 0 only computes the prompt (for `prompt_logprobs`)."""
    min_tokens: int = 0
    """No stop token, EOS or stop string ends the sequence before this many tokens."""
    temperature: float = 1.0
    """Sampling temperature; 0 takes the most likely token, the lowest id on ties."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities reach this sum."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the most likely one."""
    seed: int = 0
    """Seed that, together with the position, decides every random draw. The server draws one if the client gives
    none."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    """Token id -> bias added to its logit."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that can be generated; None for all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be generated."""
    grammar: str | None = None
    """Grammar of the text, as `engine.grammar.lark` writes it. The text may end only where the grammar allows it."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the sequence besides EOS."""
    ignore_eos: bool = False
    predicted_token_ids: tuple[int, ...] = ()
    """Tokens that the output is predicted to have, or most of them: drafts, which change no token of it."""
    thinking: ThinkingBudget | None = None
    """Limit of the thinking before the answer; None for no limit."""
    stop: tuple[str, ...] = ()
    """Strings that end the sequence. The server process, which detokenizes, looks for them in the text."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_token_ids: tuple[int, ...] = ()
    """Special tokens that `skip_special_tokens` leaves in the text: marks that its parser needs."""
    logprobs: int | None = None
    """Number of most likely tokens to return log-probabilities of, beside each generated token's own; None for none."""
    prompt_logprobs: int | None = None
    """Like `logprobs`, for the prompt's tokens. Such a request computes its whole prompt, without prefix-cache hits."""
    returns_embedding: bool = False
    """Whether the answer is the prompt's embedding, not text: see `engine.runner.pooling`. Needs max_tokens 0."""

    def __post_init__(self) -> None:
        for check in (self._check_lengths, self._check_distribution, self._check_penalties, self._check_logprobs):
            check()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def needs_history(self) -> bool:
        """Whether the next token's logits depend on the tokens before it by penalties or bad words."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0 or self.bad_words)

    def _check_lengths(self) -> None:
        _check(self.max_tokens >= 0, "max_tokens", "must be at least 0", self.max_tokens)
        _check(self.min_tokens >= 0, "min_tokens", "must be at least 0", self.min_tokens)
        rule = f"must not exceed max_tokens, which is {self.max_tokens}"
        _check(self.min_tokens <= self.max_tokens, "min_tokens", rule, self.min_tokens)
        _check(not (self.returns_embedding and self.max_tokens), "max_tokens", "must be 0 here", self.max_tokens)
        _check(0 <= self.seed <= MAX_SEED, "seed", f"must be between 0 and {MAX_SEED}", self.seed)
        if self.thinking is not None:
            budget = self.thinking.max_tokens
            _check(budget >= 0, "thinking_token_budget", "must be at least 0", budget)
        _check(all(self.stop), "stop", "must not contain an empty string")
        _check(all(self.bad_words), "bad_words", "must not contain an empty word")
        endless = self.ignore_eos and self.grammar is not None
        _check(not endless, "ignore_eos", "cannot be combined with a grammar, which ends by EOS")

    def _check_distribution(self) -> None:
        _check(_within(self.temperature, 0.0, 100.0), "temperature", "must be between 0 and 100", self.temperature)
        _check(self.top_k >= 0, "top_k", "must be at least 0 (0 keeps all tokens)", self.top_k)
        _check(self.top_k <= MAX_TOP_K, "top_k", f"must be at most {MAX_TOP_K}", self.top_k)
        _check(0.0 <= self.top_p <= 1.0, "top_p", "must be between 0 and 1", self.top_p)
        _check(_within(self.min_p, 0.0, 1.0), "min_p", "must be between 0 and 1", self.min_p)
        _check(self.allowed_token_ids != (), "allowed_token_ids", "must not be empty")
        for token_id, bias in self.logit_bias.items():
            _check(_within(bias, -100.0, 100.0), "logit_bias", f"of token {token_id} must be in [-100, 100]", bias)

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            _check(_within(getattr(self, name), -2.0, 2.0), name, "must be between -2 and 2", getattr(self, name))
        ok = _within(self.repetition_penalty, 0.01, 100.0)  # far beyond that, logits would not be finite any more
        _check(ok, "repetition_penalty", "must be between 0.01 and 100", self.repetition_penalty)

    def _check_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _check(count is None or 0 <= count <= MAX_LOGPROBS, name, f"must be between 0 and {MAX_LOGPROBS}", count)


def _within(value: float, low: float, high: float) -> bool:
    """Whether low <= value <= high; False for NaN."""
    return low <= value <= high


def _check(ok: bool, param: str, rule: str, value: float | None = None) -> None:
    if not ok:
        got = "" if value is None else f", got {value!r}"
        raise InvalidParameterError(param, f"{param} {rule}{got}.")
