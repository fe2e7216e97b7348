"""`LLM`: a model that is asked from ordinary code, many prompts at once."""

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Self, TypeVar

from tqdm.auto import tqdm

from engine.core.config import EngineInfo
from engine.core.errors import EngineUnavailableError, InvalidParameterError
from server.settings.settings import EMBEDDED_MODEL
from twostep.offline.async_engine import AsyncEngine, Message, Prompt
from twostep.offline.outputs import RequestOutput
from twostep.offline.sampling_params import SamplingParams

__all__ = ["LLM"]

T = TypeVar("T")

_PER_SEQUENCE = 2
"""Requests that the engine is given for each one that may run, so that a next one always waits."""


class LLM:
    """A model in an engine process of its own, which ends with this object, by `close`, or with the program."""

    def __init__(self, model: str = EMBEDDED_MODEL, **settings: Any) -> None:
        """Loads the model; the arguments are those of `AsyncEngine`. Raises ConfigError or ModelError."""
        self._engine = AsyncEngine(model, **settings)
        self._loop = _LoopThread()
        self._close = weakref.finalize(self, _close, self._engine, self._loop)
        try:
            self._loop.run(self._engine.start())
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Returns the answers to prompts, in their order; with one for all or one each of the parameters. None samples
        as the model's authors suggest. Ctrl-C ends all requests at once. Raises RequestError, or
        EngineUnavailableError."""
        return self._answer(_as_list(prompts, _is_prompt), sampling_params, use_tqdm, self._engine.generate)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Returns the answers in a conversation, or in several; `options` are those of `AsyncEngine.chat`."""

        def ask(conversation: Any, params: SamplingParams | None) -> AsyncGenerator[RequestOutput, None]:
            return self._engine.chat(conversation, params, **options)

        return self._answer(_as_list(messages, _is_conversation), sampling_params, use_tqdm, ask)

    @property
    def info(self) -> EngineInfo:
        """What was loaded, and the machine's ceilings."""
        return self._engine.info

    def close(self) -> None:
        """Ends the engine process and frees its memory. Idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(
        self,
        prompts: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        shows_progress: bool,
        ask: Callable[[Any, SamplingParams | None], AsyncGenerator[RequestOutput, None]],
    ) -> list[RequestOutput]:
        if not self._close.alive:
            raise EngineUnavailableError("This LLM was closed: make another one.")
        params_of_each = _one_each(params, len(prompts))
        places = asyncio.Semaphore(_PER_SEQUENCE * self._engine.limits.max_num_seqs)
        with tqdm(total=len(prompts), desc="Prompts", disable=not shows_progress, dynamic_ncols=True) as bar:

            async def answer(prompt: Any, params: SamplingParams | None) -> RequestOutput:
                async with places:
                    last = await _last_of(ask(prompt, params))
                bar.update()
                return last

            async def answer_all() -> list[RequestOutput]:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(answer(*each)) for each in zip(prompts, params_of_each, strict=True)]
                return [task.result() for task in tasks]

            return self._loop.run(answer_all())


async def _last_of(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    async with aclosing(outputs):
        async for output in outputs:
            last = output
    return last


class _LoopThread:
    """An event loop in a thread of its own: the caller may have one already, as notebooks do."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="twostep", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Returns the coroutine's result. If the wait is interrupted, by Ctrl-C, the coroutine is cancelled and has
        ended before the interruption goes on."""
        ended = threading.Event()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            tasks.append(self._loop.create_task(coroutine))
            tasks[0].add_done_callback(lambda _: ended.set())  # also of a task that is cancelled before it begins

        self._loop.call_soon_threadsafe(start)
        try:
            ended.wait()
            return tasks[0].result()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            if not ended.is_set():
                self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                ended.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _close(engine: AsyncEngine, loop: _LoopThread) -> None:
    loop.run(engine.stop())
    loop.close()


def _is_prompt(given: Any) -> bool:
    """Whether this is one prompt, not a list of them."""
    return not isinstance(given, Sequence) or isinstance(given, str) or any(isinstance(each, int) for each in given)


def _is_conversation(given: Any) -> bool:
    """Whether this is one conversation, not a list of them."""
    return any(not isinstance(each, Sequence) for each in given)


def _as_list(given: Any, is_one: Callable[[Any], bool]) -> list[Any]:
    return [given] if is_one(given) else list(given)


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise InvalidParameterError("sampling_params", "sampling_params are a SamplingParams, or a list of them.")
    if len(params) != count:
        raise InvalidParameterError(
            "sampling_params", f"There are {count} prompts and {len(params)} sampling_params: give one, or one each."
        )
    return list(params)
