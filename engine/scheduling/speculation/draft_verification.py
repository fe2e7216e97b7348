"""A decode step's request with guesses, as rows of one token each, and what becomes of the guesses; torch-free."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine.core.batch import ScheduledRequest


def shortened(request: ScheduledRequest, num_drafts: int) -> ScheduledRequest:
    """With only the first of its guesses."""
    num_tokens = len(request.token_ids) - request.num_drafts + num_drafts
    return replace(request, token_ids=request.token_ids[:num_tokens], num_drafts=num_drafts)


def rows_of(request: ScheduledRequest) -> Iterator[ScheduledRequest]:
    """A decode step's request as one for each of its tokens: as if the guesses before had been said already."""
    if request.num_drafts == 0:
        yield request
        return
    yield from (_row(request, index) for index in range(len(request.token_ids)))


def last_row(request: ScheduledRequest) -> ScheduledRequest:
    """Of `rows_of`."""
    return _row(request, request.num_drafts)


def with_draft_token(request: ScheduledRequest, token_id: int | None) -> ScheduledRequest:
    """And one guess more; without one it wants no more."""
    if token_id is None:
        return replace(request, num_wanted=request.num_drafts)
    return replace(request, token_ids=(*request.token_ids, token_id), num_drafts=request.num_drafts + 1)


def _row(request: ScheduledRequest, index: int) -> ScheduledRequest:
    return replace(
        request,
        token_ids=(request.token_ids[index],),
        start=request.start + index,
        output_token_ids=[*request.output_token_ids, *request.token_ids[1 : index + 1]],
        allowed_tokens=request.allowed_tokens[index : index + 1],
        num_drafts=0,
        num_wanted=0,
    )


def num_accepted_drafts(request: ScheduledRequest, chosen: Sequence[int | None]) -> int:
    """How many of the request's guesses are what was `chosen`, one for each of its tokens, up to the first that is
    not."""
    pairs = zip(request.draft, chosen, strict=False)
    return next((index for index, (guess, token) in enumerate(pairs) if guess != token), request.num_drafts)
