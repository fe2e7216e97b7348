"""`AsyncEngine`: a model that is asked from asyncio code, in an engine process of its own."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, Self

from engine.client.observer import NullObserver
from engine.core.config import EngineInfo, StepLimits
from engine.core.errors import ConfigError, EngineUnavailableError, InvalidParameterError
from engine.core.generation_request import SOLE_TENANT
from server.auth.api_keys import NOBODY
from server.chat.plan import plan_chat
from server.completions.plan import plan_completion
from server.core.errors import BadRequestError
from server.generation.entry import Arrival
from server.generation.fan_out import generate_all
from server.generation.plan import GenerationPlan
from server.protocol.chat import ChatRequest
from server.protocol.completions import CompletionRequest
from server.protocol.generation import GenerationParams
from server.runtime.backend import Backend, backend_opener
from server.settings.reading import read_settings
from server.settings.settings import EMBEDDED_MODEL, Settings
from twostep.offline.outputs import AnswerBuilder, RequestOutput, is_finished
from twostep.offline.sampling_params import SamplingParams, validated

__all__ = ["AsyncEngine", "Message", "Prompt"]

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or one of both as vLLM writes it: `{"prompt": ...}` or `{"prompt_token_ids": ...}`."""
Message = Mapping[str, Any]
"""A message of a conversation, as OpenAI's chat API has it: `{"role": "user", "content": ...}`."""

_CALLER = "python"  # one for all requests of this process, in limits that are kept per client
_GROUPS = ("Model", "Engine")
_WITHOUT_LIMITS = {"max_waiting": 1_000_000, "max_waiting_tokens": 10**9, "max_queue_time": 1e6}
"""The server's bounds on what may wait: a program that asks its own model waits for as long as that takes."""


class AsyncEngine:
    """A model in an engine process of its own. Use it as an async context, or call `start` and `stop`."""

    def __init__(self, model: str = EMBEDDED_MODEL, **settings: Any) -> None:
        """`settings` are those of the groups Model and Engine of `twostep serve --help`, such as `dtype` or
        `max_model_len`; TWOSTEP_* variables hold here, too. Raises ConfigError or ModelError for what can be refused
        before anything is loaded."""
        _check_names(settings)
        given = {"spare_engine": False, **settings, "model": str(model), **_WITHOUT_LIMITS}
        self.settings: Settings = read_settings(given)
        self._open = backend_opener(self.settings)
        self._context = AsyncExitStack()
        self._backend: Backend | None = None

    async def start(self) -> None:
        """Loads the model. Raises ConfigError or ModelError."""
        if self._backend is None:
            self._backend = await self._context.enter_async_context(self._open(NullObserver()))

    async def stop(self) -> None:
        """Ends the engine process and whatever it runs. Idempotent."""
        self._backend = None
        await self._context.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def info(self) -> EngineInfo:
        """What was loaded, and the machine's ceilings. Raises EngineUnavailableError before `start`."""
        return self._loaded.engine.info

    @property
    def limits(self) -> StepLimits:
        """The limits of its steps: those that were set, and the device's defaults. Raises EngineUnavailableError before
        `start`."""
        return self.settings.engine_config().limits_on(self.info.device)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the answers to a prompt as they grow, the last time finished; None samples as the model's authors
        suggest. Closing the generator ends the request at once. Raises RequestError and EngineUnavailableError."""
        text, token_ids = await self._tokens_of(prompt)
        fields = {} if sampling_params is None else sampling_params.completion_fields()
        if sampling_params is not None and sampling_params.max_tokens is None:
            fields["max_tokens"] = max(1, self.info.max_model_len - len(token_ids))
        request = validated(CompletionRequest, prompt=token_ids, **fields)
        plan = await self._planned(plan_completion(request, self._loaded, self._arrival(request)))
        async with aclosing(self._answers(plan, text)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the answers in a conversation, as `generate` does. `options` are fields of the server's chat requests
        that make the prompt: `tools`, `add_generation_prompt`, `continue_final_message`, `chat_template_kwargs`,
        `reasoning_effort`, `documents`. Texts are what the model wrote, with its marks of calls and thinking."""
        fields = {"max_tokens": 16} if sampling_params is None else sampling_params.chat_fields()
        request = validated(ChatRequest, messages=list(messages), **fields, **_known(options))
        plan, _ = await self._planned(plan_chat(request, self._loaded, self._arrival(request)))
        async with aclosing(self._answers(plan, plan.prompts[0].text)) as outputs:
            async for output in outputs:
                yield output

    @property
    def _loaded(self) -> Backend:
        if self._backend is None:
            raise EngineUnavailableError("The model is not loaded: await start() first, or use `async with`.")
        return self._backend

    async def _tokens_of(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
                raise InvalidParameterError("prompt", "A prompt of this form has either prompt or prompt_token_ids.")
            (given,) = prompt.values()
            return await self._tokens_of(given)
        if isinstance(prompt, str):
            validated(CompletionRequest, prompt=prompt)
            text, token_ids = prompt, await asyncio.to_thread(self._loaded.tokenizer.encode, prompt)
        else:
            text, token_ids = None, _token_ids(prompt)
        if not token_ids:
            raise InvalidParameterError("prompt", "The prompt must contain at least one token.")
        return text, token_ids

    def _arrival(self, request: GenerationParams) -> Arrival:
        return Arrival(
            model=self.settings.model_names[0],
            request_id=uuid.uuid4().hex,
            arrival_s=time.monotonic(),
            caller=_CALLER,
            key=NOBODY,
            tenant=SOLE_TENANT,
            cache_salt="",
            fields=request,
        )

    async def _planned(self, planning: Any) -> Any:
        """Returns what planning returns. Raises InvalidParameterError for what the server answers with 400."""
        try:
            return await planning
        except BadRequestError as error:
            raise InvalidParameterError(error.param or "prompt", str(error.detail)) from None

    async def _answers(self, plan: GenerationPlan[Any], prompt: str | None) -> AsyncGenerator[RequestOutput, None]:
        wants_logprobs = plan.request.num_logprobs is not None
        tokenizer = self._loaded.tokenizer
        answers = [AnswerBuilder(index, tokenizer, wants_logprobs) for index in range(len(plan.generations))]
        async with aclosing(generate_all(self._loaded.engine, plan.generations)) as outputs:
            async for index, output in outputs:
                answers[index].add(output)
                yield _request_output(plan, prompt, answers)


def _token_ids(prompt: object) -> list[int]:
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        token_ids = list(prompt)
        if all(isinstance(token_id, int) for token_id in token_ids):
            return token_ids
    raise InvalidParameterError("prompt", "A prompt is a text, a list of token ids, or a dict with either.")


def _request_output(plan: GenerationPlan[Any], prompt: str | None, answers: Sequence[AnswerBuilder]) -> RequestOutput:
    return RequestOutput(
        request_id=plan.generations[0].client_request_id,
        prompt=prompt,
        prompt_token_ids=plan.prompts[0].token_ids,
        prompt_logprobs=answers[0].prompt_logprobs,
        outputs=[answer.so_far() for answer in answers],
        finished=is_finished(answers),
        seed=int(plan.head["seed"]),
        num_cached_tokens=answers[0].num_cached_tokens,
        timings=tuple(answer.timings for answer in answers),
    )


_CHAT_OPTIONS = frozenset(
    "tools add_generation_prompt continue_final_message chat_template_kwargs reasoning_effort documents".split()
)


def _known(options: Mapping[str, Any]) -> Mapping[str, Any]:
    if unknown := options.keys() - _CHAT_OPTIONS:
        raise InvalidParameterError(
            min(unknown), f"chat() has no option {min(unknown)}: there are {', '.join(sorted(_CHAT_OPTIONS))}."
        )
    return options


def _check_names(settings: Mapping[str, Any]) -> None:
    for name in settings:
        field = Settings.model_fields.get(name)
        extra = None if field is None else field.json_schema_extra
        if not isinstance(extra, dict) or extra["group"] not in _GROUPS:
            raise ConfigError(
                f"{name} is no setting of a model: twostep serve --help lists them under Model and Engine, "
                "and here they are written with _."
            )
