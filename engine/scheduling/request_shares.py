"""A request's share of a step: which of its tokens are computed, and where their KV and states are; torch-free."""

from engine.core.batch import ScheduledRequest
from engine.core.request import Request
from engine.scheduling.kv_allocator import KVAllocator
from engine.scheduling.speculation.planner import NO_PLANNED_DRAFT, PlannedDraft

__all__ = ["chunk_share", "drafted_share", "share_of"]


def chunk_share(kv: KVAllocator, request: Request, num_tokens: int) -> ScheduledRequest:
    """Returns the request's share of a prefill step. The draft model computes the chunk, too."""
    return share_of(kv, request, num_tokens, draft_span=kv.draft_span(request, num_tokens))


def drafted_share(kv: KVAllocator, request: Request, planned: PlannedDraft, spare: int) -> ScheduledRequest:
    """Returns the request's share of a decode step with as much of the planned draft as blocks can be allocated for,
    leaving `spare`. Where the draft model is far behind, it makes up for a part of that, and drafts nothing. It runs
    before the step, which copies blocks, and has nothing to read there yet."""
    if not (planned.token_ids or planned.num_wanted):
        return share_of(kv, request, 1)
    draft = _with_blocks(kv, request, planned, spare)
    draft = PlannedDraft(draft.token_ids, 0) if request.block_copies else draft
    span = kv.draft_span(request, 1) if draft.num_wanted else None
    if span and span[1] <= request.num_computed_tokens:
        draft = NO_PLANNED_DRAFT
    return share_of(kv, request, 1, draft, span)


def _with_blocks(kv: KVAllocator, request: Request, draft: PlannedDraft, spare: int) -> PlannedDraft:
    draft = _cut(draft, kv.max_drafts(request))
    kv.try_allocate(request, len(draft.token_ids) + draft.num_wanted, spare)
    return _cut(draft, kv.surplus(request))


def _cut(draft: PlannedDraft, most: int) -> PlannedDraft:
    return PlannedDraft(draft.token_ids[:most], min(draft.num_wanted, most))


def share_of(
    kv: KVAllocator,
    request: Request,
    num_tokens: int,
    draft: PlannedDraft = NO_PLANNED_DRAFT,
    draft_span: tuple[int, int] | None = None,
) -> ScheduledRequest:
    """Returns the share that computes the request's next `num_tokens` own tokens, and its draft."""
    start = request.num_computed_tokens
    end = start + num_tokens
    token_ids = request.token_ids(start, end)
    token_ids.extend(draft.token_ids)
    return ScheduledRequest(
        request_id=request.request_id,
        token_ids=token_ids,
        start=start,
        block_table=tuple(request.block_table),
        window_tables=tuple(map(tuple, request.window_tables)),
        block_copies=request.block_copies,
        state_slot=request.state_slot,
        restored_slot=request.restored_slot,
        saved_slot=kv.checkpoint(request, end),
        params=request.asked.params,
        prompt_token_ids=request.asked.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        samples=end == request.num_tokens,
        num_drafts=len(draft.token_ids),
        num_wanted=draft.num_wanted,
        draft_span=draft_span,
        scores_prompt=request.scores_prompt,
        adapter=None if request.adapter is None else request.adapter.number,
    )
