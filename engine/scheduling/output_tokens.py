"""Which of a step's tokens a request takes, whether one finishes it: EOS, a stop token or its length; torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.request import FinishReason, Request

EXHAUSTED = "The request's grammar is too complex: it took more time, or more states, than one request may have."
NO_TOKEN_LEFT = "No token can come next: the request's grammar, and what it allows and forbids besides, leave none."
NOT_FINITE = "The model computed no finite numbers: its weights are damaged, or its type has too small a range."


@dataclass(frozen=True, slots=True)
class AppendedTokens:
    """The tokens that were appended to a request's output, and whether they finish it."""

    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_token_id: int | None = None
    """The stop token that finishes the request, when it is not EOS."""


def append_tokens(request: Request, token_ids: Sequence[int], eos_token_ids: frozenset[int]) -> AppendedTokens:
    """Append sampled tokens to the request's output, up to the first that finishes it. None are appended to an output
    that the request came with and that is finished already."""
    reason, stop_token_id = _end_of(request, eos_token_ids)
    appended: list[int] = []
    for token_id in token_ids:
        if reason is not None:
            break
        request.output_token_ids.append(token_id)
        appended.append(token_id)
        reason, stop_token_id = _end_of(request, eos_token_ids)
    return AppendedTokens(appended, reason, stop_token_id)


def why_no_token(request: Request, is_finite: bool) -> tuple[str, bool]:
    """Returns why no token was sampled for the request, and whether that is its own fault. `is_finite` says whether its
    logits were numbers."""
    if not is_finite:
        return NOT_FINITE, False
    if request.constraint is not None and request.constraint.is_exhausted:
        return EXHAUSTED, True
    return NO_TOKEN_LEFT, True


def _end_of(request: Request, eos_token_ids: frozenset[int]) -> tuple[FinishReason | None, int | None]:
    """Returns why the output ends with its last token, if it does, and the stop token that ends it."""
    params, output = request.asked.params, request.output_token_ids
    if output and len(output) >= params.min_tokens:
        if output[-1] in params.stop_token_ids:
            return FinishReason.STOP, output[-1]
        if output[-1] in eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP, None
    return (FinishReason.LENGTH if len(output) >= params.max_tokens else None), None
