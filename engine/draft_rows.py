"""A decode step's request with guesses, as rows of one token each, and what becomes of the guesses; torch-free."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine.batch import ScheduledRequest


def shortened(request: ScheduledRequest, num_drafts: int) -> ScheduledRequest:
    """With only the first of its guesses."""
    num_tokens = len(request.token_ids) - request.num_drafts + num_drafts
    return replace(request, token_ids=request.token_ids[:num_tokens], num_drafts=num_drafts)


def rows_of(request: ScheduledRequest) -> Iterator[ScheduledRequest]:
    """A decode step's request as one for each of its tokens: as if the guesses before had been said already."""
    if request.num_drafts == 0:
        yield request
        return
    for index, token_id in enumerate(request.token_ids):
        output = [*request.output_token_ids, *request.token_ids[1 : index + 1]]
        yield replace(
            request,
            token_ids=(token_id,),
            start=request.start + index,
            output_token_ids=output,
            allowed_tokens=request.allowed_tokens[index : index + 1],
            num_drafts=0,
        )


def num_right(request: ScheduledRequest, chosen: Sequence[int | None]) -> int:
    """How many of the request's guesses are what was `chosen`, one for each of its tokens, up to the first that is
    not."""
    pairs = zip(request.draft, chosen, strict=False)
    return next((index for index, (guess, token) in enumerate(pairs) if guess != token), request.num_drafts)
