"""One request on the server's side, from admission to its end: turns updates into outputs with text and timings."""

import time
from collections.abc import Callable, Iterator

import msgspec

from engine.client.admission import Place
from engine.client.mailbox import Mailbox
from engine.client.request_timeouts import RequestTimeouts
from engine.core.errors import (
    DeadlineError,
    EngineFailedError,
    RequestAbortedError,
    RequestError,
    RequestTimeoutError,
    TwostepError,
)
from engine.core.generation_request import GenerationRequest
from engine.core.messages import AddRequest, FirstTokenInfo, RequestUpdate
from engine.core.outputs import RequestOutput
from engine.core.prompt_logprobs import PromptLogprobs
from engine.core.request import FinishReason
from engine.core.stats import RequestTimings
from engine.text.detokenizer import IncrementalDetokenizer, TokenTable

_STALLED_S = 1.0
"""How much newer than the oldest unread update the newest one is when the reader counts as stalled."""


class TimedUpdate(msgspec.Struct, frozen=True, gc=False):
    """A request's update from one step; `time_s` is when its tokens came to exist."""

    update: RequestUpdate
    time_s: float
    stop_reason: str | None = None
    """Why the server ended the request; None if the engine did."""


def timed_update(update: RequestUpdate, time_s: float) -> TimedUpdate | TwostepError:
    """Returns what to put into a request that a step at `time_s` updated: the update, or the error that ended it."""
    if update.finish_reason is not FinishReason.ERROR:
        return TimedUpdate(update, time_s)
    message = update.error or "The engine failed on this request."
    return RequestError(message) if update.blames_request else EngineFailedError(message)


class LiveRequest:
    """Stands between the receive loop, which puts updates in, and the request's own task, which makes outputs of them.

    Holds all that is needed to give the request to another engine process: what was asked, and the tokens received so
    far. Those tokens are in order and each of them once, because all messages of an engine that dies are received
    before the next one is told to go on.
    """

    timeouts: RequestTimeouts
    """The request's timers, which are set when it is admitted and cancelled when it ends."""

    def __init__(self, request: GenerationRequest, engine_id: str, table: TokenTable, place: Place) -> None:
        params = request.params
        self.request = request
        self.engine_id = engine_id
        """The id that the engine knows. It begins with the id that the client chose, and is never used twice."""
        self.place = place
        """Its place in admission control, which it leaves when it ends."""
        self.first_token_s: float | None = None
        """Time of the engine's first update, which the request's task may not have read yet."""
        self.last_token_s = 0.0
        """Time of the engine's newest update, which the request's task may not have read yet."""
        self.is_stalled = False
        """Whether its reader has fallen behind, as when a client takes no bytes, and has not caught up since."""
        self.on_stall: Callable[[LiveRequest], None] = lambda live: None
        """Hears of each change of `is_stalled`."""
        self.is_known_to_engine = False
        """True from when the request is sent to an engine process until its last update, or that process's death."""
        self.is_held = False
        """Whether the engine gets it later: another server computes its prompt."""
        self.num_announced_tokens = request.num_announced_tokens
        """Its first tokens of which another server says that it stored their blocks."""
        self.is_complete = False
        """Whether the last update has arrived; the request's task may not have read it yet."""
        self._received_token_ids = list(request.given_token_ids)  # text may stop before the last ones
        self._num_received_before = 0  # from earlier engine processes than the one that knows it
        self._num_preemptions_before = 0
        self._num_output_tokens = 0
        self.last_gap_s: float | None = None
        """Seconds between the newest output's token and the one before; None for the first."""
        self._updates: Mailbox[TimedUpdate | TwostepError] = Mailbox()
        self._clock = TokenClock(request.arrival_s)
        self._num_cached_tokens = 0
        self._detokenizer = IncrementalDetokenizer(
            table,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
            shown_token_ids=params.shown_token_ids,
        )

    def hand_over(self) -> AddRequest:
        """Returns the message that makes an engine process start the request, or continue it. From now on that process
        counts as knowing it."""
        self.is_known_to_engine = True
        self._num_received_before = self.num_received
        self._num_preemptions_before = self._clock.num_preemptions
        return AddRequest(
            request_id=self.engine_id,
            asked=self.request,
            num_announced_tokens=self.num_announced_tokens,
            output_token_ids=self._received_token_ids,
            is_stalled=self.is_stalled,
        )

    def resume_with(self, num_stored_tokens: int, remote_s: float | None) -> None:
        """Let the engine have the request: of its first tokens another server stored the blocks, for which the request
        waited `remote_s`, None if nobody was asked."""
        self.is_held = False
        self.num_announced_tokens = num_stored_tokens
        self._clock.remote_prefill_s = remote_s

    def is_of(self, tenant: str, client_request_id: str | None) -> bool:
        return self.request.tenant == tenant and client_request_id in (None, self.request.client_request_id)

    @property
    def has_begun(self) -> bool:
        """Whether an update has arrived from the engine."""
        return self.first_token_s is not None

    @property
    def num_received(self) -> int:
        """Number of tokens received; the request's task may not have read all."""
        return len(self._received_token_ids)

    @property
    def is_proven(self) -> bool:
        """Whether the engine process that knows it survived its prefill and its decode: see
        `engine.process.poison_requests`."""
        return self.is_complete or self.num_received >= self._num_received_before + 2

    @property
    def timings(self) -> RequestTimings | None:
        """The request's timings so far; None before its first token."""
        return self._clock.timings() if self._num_output_tokens else None

    @property
    def queue_s(self) -> float | None:
        """Time from arrival until first scheduled; None before its first token."""
        timings = self._clock.timings(with_gaps=False)
        return None if timings is None else timings.queue_s

    def put(self, item: TimedUpdate | TwostepError) -> None:
        """Add an update, or an error, which ends the request once the updates before it are read."""
        if isinstance(item, TwostepError):
            self._put_last(item)
            return
        self.first_token_s = item.time_s if self.first_token_s is None else self.first_token_s
        self.last_token_s = item.time_s
        self.place.begin()
        self._received_token_ids += item.update.token_ids
        self._clock.num_preemptions = self._num_preemptions_before + item.update.num_preemptions
        for each in self._with_given(item):
            if each.update.finish_reason is None:
                self._updates.put(each)
            else:
                self._put_last(each)
        self._watch_reader()

    def _with_given(self, timed: TimedUpdate) -> Iterator[TimedUpdate]:
        """Yields the update, the first one of an engine with the tokens that the request came with before it: these may
        have been the whole answer."""
        update, given = timed.update, self.request.given_token_ids
        if update.first is None or not given:
            yield from _split_by_token(timed)
        elif not update.token_ids:
            yield msgspec.structs.replace(timed, update=msgspec.structs.replace(update, token_ids=given))
        else:
            yield TimedUpdate(RequestUpdate(self.engine_id, token_ids=given, first=update.first), timed.time_s)
            yield from _split_by_token(timed)

    def expire(self) -> None:
        """End the request at its deadline with the tokens that there are. The caller aborts it in the engine."""
        self._end_early("deadline", DeadlineError("The deadline passed before the first token."))

    def abort(self) -> None:
        """End the request as at a deadline, because an abort was asked for."""
        self._end_early("abort", RequestAbortedError("The request was aborted before its first token."))

    def leave_queue(self, limit_s: float) -> None:
        """End the request because it waited `limit_s` to be scheduled, which may be less than it asked for."""
        message = "The request waited too long to be scheduled; try again later."
        self._put_last(RequestTimeoutError(message, is_own_limit=limit_s == self.request.max_queue_s))

    def _end_early(self, stop_reason: str, error: TwostepError) -> None:
        """End the request with `stop_reason`, or with the error if it has no tokens."""
        end = RequestUpdate(self.engine_id, finish_reason=FinishReason.LENGTH)
        self._put_last(TimedUpdate(end, time.monotonic(), stop_reason) if self.has_begun else error)

    def _put_last(self, item: TimedUpdate | TwostepError) -> None:
        self.is_complete = True
        self.is_known_to_engine = False
        self._updates.put(item)

    async def next_output(self) -> RequestOutput:
        """Waits for the next update and returns the output made of it. Raises the error that was put."""
        item = await self._updates.get()
        self._watch_reader()
        if isinstance(item, TwostepError):
            raise item
        return self._output(item)

    def _watch_reader(self) -> None:
        """Reports a reader that has fallen behind, or has caught up."""
        oldest = self._updates.oldest
        is_stalled = self.is_stalled and oldest is not None
        if not self.is_stalled and isinstance(oldest, TimedUpdate):
            is_stalled = self.last_token_s - oldest.time_s > _STALLED_S
        if is_stalled != self.is_stalled:
            self.is_stalled = is_stalled
            self.on_stall(self)

    def _output(self, timed: TimedUpdate) -> RequestOutput:
        update, time_s = timed.update, timed.time_s
        is_first = update.first is not None
        if update.first is not None:
            # Of tokens that were given, some may be cached, too.
            self._num_cached_tokens = min(update.first.num_cached_tokens, len(self.request.prompt_token_ids))
            self._clock.start(update.first, time_s)
        text, num_kept = self._text_of(update)
        self._num_output_tokens += num_kept
        self.last_gap_s = self._clock.add_tokens(num_kept, time_s)
        finish_reason, stop_reason = self._end_of(timed)
        timings = self._clock.timings(with_gaps=finish_reason is not None) if is_first or finish_reason else None
        return RequestOutput(
            text=text,
            token_ids=update.token_ids[:num_kept],
            logprobs=update.logprobs[:num_kept],
            prompt_logprobs=_prompt_logprobs(update.first),
            embedding=update.embedding,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=self._num_cached_tokens,
            num_stored_tokens=update.num_stored_tokens,
            num_output_tokens=self._num_output_tokens,
            timings=timings,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _text_of(self, update: RequestUpdate) -> tuple[str, int]:
        """Returns the text, and the number of tokens up to and including the one that completes a stop string.

        A token that ends the sequence (EOS, a stop token) has no text unless the stop is to be shown.
        """
        token_ids = update.token_ids
        hides_last = update.finish_reason is FinishReason.STOP and not self.request.params.include_stop_str_in_output
        texts = []
        for index, token_id in enumerate(token_ids[:-1] if hides_last else token_ids):
            texts.append(self._detokenizer.append(token_id))
            if self._detokenizer.stop_string is not None:
                return "".join(texts), index + 1
        if update.finish_reason is not None:
            texts.append(self._detokenizer.flush())
        return "".join(texts), len(token_ids)

    def _end_of(self, timed: TimedUpdate) -> tuple[FinishReason | None, int | str | None]:
        if self._detokenizer.stop_string is not None:
            return FinishReason.STOP, self._detokenizer.stop_string
        return (
            timed.update.finish_reason,
            timed.update.stop_token_id if timed.stop_reason is None else timed.stop_reason,
        )


def _split_by_token(timed: TimedUpdate) -> Iterator[TimedUpdate]:
    """Yields an update with one token at a time if they have logprobs: an output shows which text a logprob belongs to,
    and must not depend on how many draft tokens a step accepted."""
    update = timed.update
    last = len(update.logprobs) - 1
    if last < 1:
        yield timed
        return
    for index, (token_id, scores) in enumerate(zip(update.token_ids, update.logprobs, strict=True)):
        alone = msgspec.structs.replace(
            update,
            token_ids=(token_id,),
            logprobs=(scores,),
            first=update.first if index == 0 else None,
            finish_reason=update.finish_reason if index == last else None,
            stop_token_id=update.stop_token_id if index == last else None,
        )
        yield msgspec.structs.replace(timed, update=alone)


class TokenClock:
    """When a request's tokens came to exist, all on the monotonic clock that both processes share."""

    def __init__(self, arrival_s: float) -> None:
        self._arrival_s = arrival_s
        self._first_scheduled_s: float | None = None
        self._first_token_s = 0.0
        self._last_token_s: float | None = None
        self._num_prefill_chunks = 0
        self._gaps_s: list[float] = []
        self.remote_prefill_s: float | None = None
        self.num_preemptions = 0

    def start(self, first: FirstTokenInfo, time_s: float) -> None:
        self._first_scheduled_s = first.first_scheduled_s
        self._first_token_s = time_s
        self._num_prefill_chunks = first.num_prefill_chunks

    def add_tokens(self, num_tokens: int, time_s: float) -> float | None:
        """Adds tokens of one step, which have no gap between each other. Returns the gap before them."""
        if num_tokens == 0:
            return None
        gap_s = None if self._last_token_s is None else time_s - self._last_token_s
        self._gaps_s += [0.0] * (num_tokens - 1) if gap_s is None else [gap_s, *[0.0] * (num_tokens - 1)]
        self._last_token_s = time_s
        return gap_s

    def timings(self, with_gaps: bool = True) -> RequestTimings | None:
        """Returns the timings so far; None for a request that was never scheduled."""
        if self._first_scheduled_s is None:
            return None
        return RequestTimings(
            queue_s=self._first_scheduled_s - self._arrival_s - (self.remote_prefill_s or 0.0),
            remote_prefill_s=self.remote_prefill_s,
            prefill_s=self._first_token_s - self._first_scheduled_s,
            inter_token_s=tuple(self._gaps_s) if with_gaps else (),
            prefill_chunks=self._num_prefill_chunks,
            preemptions=self.num_preemptions,
        )


def _prompt_logprobs(first: FirstTokenInfo | None) -> PromptLogprobs | None:
    return None if first is None or first.prompt_logprobs is None else PromptLogprobs(first.prompt_logprobs)
