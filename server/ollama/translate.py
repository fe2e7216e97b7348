"""A request of Ollama's API -> the chat request, or for a raw prompt the completion request, that asks for the same."""

from typing import Any

from server.chat.translated import chat_request, given
from server.core.errors import BadRequestError
from server.generation.error_renaming import ErrorRenaming
from server.ollama.turns import messages_of
from server.protocol.chat import ChatRequest
from server.protocol.completions import CompletionRequest
from server.protocol.generation import SamplingFields
from server.protocol.ollama import Format, OllamaChatRequest, OllamaGenerateRequest, OllamaGeneration, OllamaOptions

_AS_THEY_ARE = "temperature top_k top_p min_p seed presence_penalty frequency_penalty stop".split()

RENAMING = ErrorRenaming(
    (rf"(?<![.\w])({'|'.join(_AS_THEY_ARE)})", lambda found: f"options.{found[1]}"),
    ("repetition_penalty", "options.repeat_penalty"),
    ("max_completion_tokens|max_tokens", "options.num_predict"),
    (r"response_format\.json_schema|response_format", "format"),
    ("thinking_token_budget|reasoning_effort|chat_template_kwargs", "think"),
)
"""Gives errors of the translated request the names of this API."""


class RawPrompt(CompletionRequest):
    """A completion that may be as long as fits the context, and ends with it."""

    def max_tokens_behind(self, num_prompt_tokens: int, max_model_len: int) -> int:
        left = max(1, max_model_len - num_prompt_tokens)
        return left if self.max_tokens is None else min(self.max_tokens, left)


def chat_of(request: OllamaGeneration, ends_thinking: bool) -> ChatRequest:
    """Returns the chat request. `ends_thinking` where the model thinks even if its template is told that it must not.
    Raises ValidationError, with the names of the chat API, or BadRequestError."""
    fields = given(
        stream=request.stream or None,
        response_format=_response_format(request.format),
        reasoning_effort=request.think if isinstance(request.think, str) else None,
        chat_template_kwargs=_thinking_variables(request),
        thinking_token_budget=0 if ends_thinking else None,
        **_sampling(request.options),
    )
    return chat_request(request, fields | _conversation(request))


def raw_prompt(request: OllamaGenerateRequest) -> RawPrompt:
    """Returns the completion request. Raises ValidationError, with the names of the completions API."""
    shared = request.model_fields_set & SamplingFields.model_fields.keys()
    fields = given(
        prompt=request.prompt,
        stream=request.stream or None,
        response_format=_response_format(request.format),
        **_sampling(request.options),
    )
    return RawPrompt.model_validate({name: getattr(request, name) for name in shared} | fields)


def _conversation(request: OllamaGeneration) -> dict[str, Any]:
    """Returns the messages and tools. A conversation that ends with the assistant's text is continued there."""
    if isinstance(request, OllamaGenerateRequest):
        system = [{"role": "system", "content": request.system}] if request.system else []
        return {"messages": [*system, {"role": "user", "content": request.prompt}]}
    assert isinstance(request, OllamaChatRequest)
    last = request.messages[-1]
    return given(
        messages=messages_of(request.messages),
        tools=request.tools,
        continue_final_message=True if last.role == "assistant" and not last.tool_calls else None,
    )


def _sampling(options: OllamaOptions) -> dict[str, Any]:
    return given(
        **{name: getattr(options, name) for name in _AS_THEY_ARE},
        repetition_penalty=options.repeat_penalty,
        max_tokens=options.max_tokens,
    )


def _response_format(form: Format | None) -> dict[str, Any] | None:
    if isinstance(form, dict):
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form}}
    return {"type": "json_object"} if form else None


def _thinking_variables(request: OllamaGeneration) -> dict[str, bool]:
    """Returns the template variables that turn thinking on or off. Templates of models without a choice ignore them."""
    if not isinstance(request.think, bool):
        return {}
    return {"enable_thinking": request.think, "thinking": request.think}


def no_thinking(request: OllamaGeneration) -> BadRequestError:
    """Returns the error of a request that asks a model to think that does not."""
    return BadRequestError(f"think: {request.think!r} is refused, for this model does not think.", "think")
