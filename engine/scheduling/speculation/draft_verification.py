"""Draft verification: a request with draft tokens as rows of one token each, and how many of them are accepted;
torch-free."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine.core.batch import ScheduledRequest


def shortened(request: ScheduledRequest, num_drafts: int) -> ScheduledRequest:
    """Returns the request with only the first `num_drafts` of its draft tokens."""
    num_tokens = len(request.token_ids) - request.num_drafts + num_drafts
    return replace(request, token_ids=request.token_ids[:num_tokens], num_drafts=num_drafts)


def rows_of(request: ScheduledRequest) -> Iterator[ScheduledRequest]:
    """Yields a decode step's request as one row for each of its tokens, as if the draft tokens before it had been
    sampled already."""
    if request.num_drafts == 0:
        yield request
        return
    yield from (_row(request, index) for index in range(len(request.token_ids)))


def last_row(request: ScheduledRequest) -> ScheduledRequest:
    """Returns the last of the request's rows: see `rows_of`."""
    return _row(request, request.num_drafts)


def draft_row(request: ScheduledRequest) -> ScheduledRequest:
    """Returns the row after which the draft model proposes its first token: the request's last one, with the tokens
    before it that a draft model with KV of its own has not computed yet."""
    if request.draft_span is None:
        return last_row(request)
    start, end = request.draft_span
    num_prompt = len(request.prompt_token_ids)
    outputs = request.output_token_ids[max(0, start - num_prompt) : max(0, end - num_prompt)]
    return replace(
        request, token_ids=[*request.prompt_token_ids[start:end], *outputs], start=start, num_drafts=0, num_wanted=0
    )


def end_of_draft_kv(request: ScheduledRequest, end: int) -> int:
    """Returns the position up to which a draft model with KV of its own has computed the request's own tokens, after a
    step in which these end at `end`. It computes each of its draft tokens but the last."""
    assert request.draft_span is not None
    num_accepted = end - (request.end - request.num_drafts)
    return request.draft_span[1] + min(num_accepted, max(request.num_drafts - 1, 0))


def with_draft_token(request: ScheduledRequest, token_id: int | None) -> ScheduledRequest:
    """Returns the request with one more draft token; with None, it no longer wants any more."""
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
    """Returns how many of the request's draft tokens are accepted: all before the first that is not what was `chosen`
    at its position. One token, or None, is chosen for each of the request's tokens."""
    pairs = zip(request.draft, chosen, strict=False)
    return next((index for index, (draft, token) in enumerate(pairs) if draft != token), request.num_drafts)
