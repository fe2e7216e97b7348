"""Compiles grammars for the model's vocabulary with llguidance, in a thread beside the engine's steps.

Measured against xgrammar 0.2.8 on one core of a 2.1 GHz Xeon, vocabularies of 32,000 and
150,000 tokens, random tokens out of each mask:

                                       llguidance 1.9.1        xgrammar 0.2.8
    compile a small / a large schema   1-4 ms / 7-17 ms        5-76 ms / 180-2300 ms
    one mask, median                   4-9 us                  8-16 us
    one mask, worst                    0.4-9 ms                0.3-28 ms
    import                             35 ms, 9 MB             3.2 s, 258 MB: torch and transformers

Compiling and masking release the GIL. Making the `LLTokenizer` does not (0.9 s for 150,000 tokens), so the engine makes
it while it loads, not when the first grammar arrives.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.core.config import EngineConfig, EngineInfo
from engine.core.errors import ModelError, RequestError
from engine.core.request import Constraint, Request
from engine.grammar.jump_forward import Alphabet
from engine.grammar.matcher import Matcher
from engine.scheduling.fair_queue import FairQueue
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

CACHE_SIZE = 16  # compiled grammars kept for later requests with the same grammar
NEW_WAIT_S = 0.002  # most are compiled by then

# Otherwise llguidance calls the tokenizer, in Python, for the canonical tokens of forced text; any spelling will do.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
_STACK_BYTES = 16 << 20  # the compiler recurses; more than grammars are checked with (`engine.grammar.checker_process`)
# Regexes whose tokens are masked together: most tokens fit in any JSON string. The library's default has two more, for
# white space and long strings: without them masks are the same and as fast, and 150,000 tokens take 59 MB, not 87.
_SLICES = [r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]{1,30}']
# A state takes 1-2 KB. Expressions with 150,000 tokens need more than 5,000 items for a mask.
_LIMITS = LLParserLimits(verbose_errors=False, max_lexer_states=20_000, step_max_items=10_000)


class GrammarCompiler:
    """Compiles grammars for one vocabulary and caches the last ones. Called by one thread at a time."""

    def __init__(self, tokenizer: LLTokenizer, clock: Callable[[], float] = time.thread_time) -> None:
        """`clock` measures the CPU time of matchers, in seconds."""
        self._tokenizer = tokenizer
        self._clock = clock
        self._alphabet = Alphabet.of(tokenizer)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # least recently used first

    def __call__(self, grammar: str) -> Matcher:
        """Returns a new matcher of the grammar. That of a grammar that cannot be compiled allows no token."""
        compiled = self._compiled.pop(grammar, None) or compile_grammar(self._tokenizer, grammar)
        self._compiled[grammar] = compiled
        if len(self._compiled) > CACHE_SIZE:
            self._compiled.popitem(last=False)
        return Matcher(compiled.deep_copy(), partial(self._recompile, grammar), self._alphabet, self._clock)

    def _recompile(self, grammar: str) -> tuple[LLMatcher, float]:
        """Compiles the grammar again, for a new lexer: copies of a matcher share one, which has reached its limit.

        Returns the matcher and the seconds it took. Later requests use the new lexer, too. May be called by any thread.
        """
        self._compiled.pop(grammar, None)
        with _thread_with_stack(_STACK_BYTES) as thread:
            return thread.submit(self._timed_compile, grammar).result()

    def _timed_compile(self, grammar: str) -> tuple[LLMatcher, float]:
        started_s = self._clock()  # by default the CPU time of this thread
        compiled = compile_grammar(self._tokenizer, grammar)
        return compiled, self._clock() - started_s


class Grammars(Protocol):
    """Requests whose grammars are being compiled; the scheduler gets them when that is done."""

    def __len__(self) -> int: ...

    def __contains__(self, request_id: str) -> bool: ...

    @property
    def request_ids(self) -> Sequence[str]: ...

    def add(self, request: Request) -> None:
        """Starts compiling the grammar of the request, which must have one. Raises RequestError."""

    def abort(self, request_ids: Iterable[str]) -> None:
        """Removes the requests; other ids are ignored."""

    def take_ready(self, timeout_s: float) -> list[Request]:
        """Removes and returns the requests whose grammars are compiled, in order of arrival; waits up to `timeout_s`
        for the first. The first call after a request was added waits a moment for it in any case: what is compiled now
        waits for no other step."""

    def close(self) -> None: ...


class NoGrammars:
    """Refuses all grammars: for models that cannot follow any."""

    def __len__(self) -> int:
        return 0

    def __contains__(self, request_id: str) -> bool:
        return False

    @property
    def request_ids(self) -> Sequence[str]:
        return ()

    def add(self, request: Request) -> None:
        raise RequestError(
            "This model cannot be made to follow a schema or grammar: it has no EOS token or no tokenizer."
        )

    def abort(self, request_ids: Iterable[str]) -> None:
        pass

    def take_ready(self, timeout_s: float) -> list[Request]:
        return []

    def close(self) -> None:
        pass


def _thread_with_stack(num_bytes: int) -> ThreadPoolExecutor:
    """Returns an executor whose one thread has this stack size. It is started here, since the size is a setting of the
    process, for all threads started meanwhile."""
    before = threading.stack_size(num_bytes)
    try:
        thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        thread.submit(int).result()
        return thread
    finally:
        threading.stack_size(before)


class GrammarQueue:
    """Compiles in a thread of its own, beside the engine's steps. Tenants share its time by their weights."""

    def __init__(self, compile: Callable[[str], Constraint], clock: Callable[[], float] = time.monotonic) -> None:
        self._compile = compile
        self._clock = clock
        self._thread = _thread_with_stack(_STACK_BYTES)
        self._pending: dict[str, tuple[Request, Future[Constraint]]] = {}
        self._new = set[str]()  # those that no call of `take_ready` has waited for
        self._queue = FairQueue()  # the pending requests whose compilation has not started
        self._lock = threading.Lock()  # guards `_queue` and `_pending`, which both threads use

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    @property
    def request_ids(self) -> Sequence[str]:
        return list(self._pending)

    def add(self, request: Request) -> None:
        with self._lock:
            self._pending[request.request_id] = (request, Future())
            self._queue.add(request)
        self._new.add(request.request_id)
        self._thread.submit(self._compile_next)

    def abort(self, request_ids: Iterable[str]) -> None:
        with self._lock:
            found = [self._pending.pop(request_id) for request_id in request_ids if request_id in self._pending]
            for request, compiling in found:
                if compiling.cancel():  # it had not started
                    self._queue.remove(request)

    def take_ready(self, timeout_s: float) -> list[Request]:
        new = [self._pending[request_id][1] for request_id in self._new & self._pending.keys()]
        self._new.clear()
        wait(new, NEW_WAIT_S)
        if not self._pending:
            return []
        wait([compiling for _, compiling in self._pending.values()], timeout_s, FIRST_COMPLETED)
        ready = [pending for pending in self._pending.values() if pending[1].done()]
        for request, compiling in ready:
            del self._pending[request.request_id]
            request.constraint = compiling.result()
        return [request for request, _ in ready]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile_next(self) -> None:
        """Compiles the grammar of the request whose turn it is. Runs in the thread, once for each request that was
        added."""
        with self._lock:
            request = self._queue.next()
            if request is None:  # some were aborted
                return
            self._queue.remove(request)
            self._queue.start(request, 0.0)
            compiling = self._pending[request.request_id][1]
            compiling.set_running_or_notify_cancel()
        assert request.asked.params.grammar is not None
        started_s = self._clock()
        try:
            compiling.set_result(self._compile(request.asked.params.grammar))
        except BaseException as error:  # raised by `take_ready`, which would wait for ever otherwise
            compiling.set_exception(error)
        with self._lock:
            self._queue.charge(request, self._clock() - started_s)


def load_grammars(config: EngineConfig, info: EngineInfo) -> Grammars:
    """Returns the grammars of the loaded model. Takes up to two seconds with the largest vocabularies."""
    if not info.eos_token_ids:
        return NoGrammars()
    try:
        tokenizer = Tokenizer.from_pretrained(
            config.tokenizer or config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except ModelError as error:
        logger.warning("requests cannot have a grammar: %s", error)
        return NoGrammars()
    return GrammarQueue(compiler_for(tokenizer, info))


def compiler_for(tokenizer: Tokenizer, info: EngineInfo) -> GrammarCompiler:
    texts = [b"" if i in tokenizer.special_ids else tokenizer.token_bytes(i) for i in range(info.vocab_size)]
    return GrammarCompiler(make_tokenizer(texts, info.eos_token_ids))


def make_tokenizer(tokens: Sequence[bytes], eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Returns llguidance's tokenizer. `tokens` has the bytes of each token id's text, empty for tokens that are no
    text."""
    vocabulary = _Vocabulary(tokens, eos_token_ids[0])
    tokenizer = LLTokenizer(vocabulary, eos_token=list(eos_token_ids), slices=_SLICES)  # type: ignore[arg-type]
    vocabulary.tokens.clear()  # they were copied, and the tokenizer keeps a reference to the vocabulary
    return tokenizer


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compiles the grammar. Never raises: ask `is_error()` of the result.

    The library bounds its work by fuel, but not on every path: see `engine.grammar.checker`.
    """
    return LLMatcher(tokenizer, _OPTIONS + grammar, log_level=0, limits=_LIMITS)


class _Vocabulary:
    """The attributes that `LLTokenizer` reads of a tokenizer, and the call that it makes only to force tokens."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokens: Sequence[bytes], eos_token_id: int) -> None:
        self.tokens = list(tokens)
        self.eos_token_id = eos_token_id

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError
