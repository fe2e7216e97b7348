"""POST /v1/chat/completions: its parameters beyond those of `protocol.generation`, and its response models."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from server.protocol.answers import PredictionDetails, PromptLogprob, Timings, Usage
from server.protocol.generation import GenerationParams, wrong
from server.protocol.messages import AssistantMessage, Messages
from server.protocol.tools import ToolParams
from server.protocol.wire import Int32, JsonObject, Text, bounded_size

MAX_TOP_LOGPROBS = 20
_ASKS_TO_CONTINUE = ("prefix", "partial")
"""Fields with which other servers are told, in the last message, that its text is to be continued."""
_GIVEN_BY_FIELDS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


class ConversationParams(ToolParams):
    """The parameters that determine the prompt of a conversation."""

    messages: Messages
    add_generation_prompt: bool | None = Field(
        None,
        description="End the prompt where the assistant's turn begins. Default: unless continue_final_message.",
    )
    continue_final_message: bool = Field(False, description="Continue the last message where its text ends.")
    chat_template: Text | None = Field(
        None, description="A template for this request. Only where --trust-request-chat-template is set."
    )
    chat_template_kwargs: JsonObject = Field({}, description="Variables passed to the chat template.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Passed to the chat template, which is also told whether to think: not at all with none."
    )
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True), bounded_size] | None = Field(
        None, description="Passed to the chat template, if it reads them."
    )
    add_special_tokens: bool = Field(False, description="Add special tokens beside those that the template writes.")

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template: those of the request's own kwargs, and what the effort says."""
        if self.reasoning_effort is None:
            return self.chat_template_kwargs
        thinks = self.reasoning_effort != "none"
        effort = {"reasoning_effort": self.reasoning_effort, "enable_thinking": thinks, "thinking": thinks}
        return {**effort, **self.chat_template_kwargs}

    @property
    def opens_turn(self) -> bool:
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    def check_conversation(self) -> None:
        if self.continue_final_message and self.opens_turn:
            raise wrong("add_generation_prompt", "cannot be combined with continue_final_message")
        if isinstance(last := self.messages[-1], AssistantMessage):
            self._check_final(last)
        self.check_tools()
        for name in _GIVEN_BY_FIELDS:
            if name in self.chat_template_kwargs:
                raise wrong("chat_template_kwargs", f"must not contain {name!r}, which is a field of its own")

    def _check_final(self, message: AssistantMessage) -> None:
        if self.continue_final_message and message.tool_calls:
            raise wrong("messages", "cannot be continued behind tool calls, only where they end with text")
        for name in _ASKS_TO_CONTINUE:
            if (message.model_extra or {}).get(name) and not self.continue_final_message:
                raise wrong(f"messages.{len(self.messages) - 1}.{name}", "needs continue_final_message: true")


class ChatRequest(ConversationParams, GenerationParams):
    max_tokens: Int32 | None = Field(None, description="Default: as many as fit the context.")
    max_completion_tokens: Int32 | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description="Needs logprobs.")
    thinking_token_budget: Int32 | None = Field(
        None, ge=0, description="Thinking ends after this many tokens, if the model has not ended it before."
    )
    echo: bool = Field(False, description="With continue_final_message: begin the answer with what it continues.")

    @model_validator(mode="after")
    def _check_combinations(self) -> "ChatRequest":
        self.check_stream_options()
        self.check_conversation()
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", "needs logprobs: true")
        if self.echo and not self.continue_final_message:
            raise wrong("echo", "needs continue_final_message: true")
        if self.max_tokens not in (None, self.token_limit):
            raise wrong("max_tokens", "must not differ from max_completion_tokens, its newer name")
        if self.token_limit == 0 and self.prompt_logprobs is None:
            name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
            raise wrong(name, "must be at least 1, unless prompt_logprobs is given")
        return self

    @property
    def token_limit(self) -> int | None:
        """Maximum number of tokens to generate; None for as many as fit the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(BaseModel):
    name: str
    arguments: str


class AnsweredCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledFunctionDelta(BaseModel):
    name: str | None = None
    arguments: str


class CallDelta(BaseModel):
    """A piece of a tool call. The first one of an index has id, type and name; arguments are to be concatenated."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunctionDelta


class AssistantAnswer(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredCall] | None = None


class _ChatChoice(BaseModel):
    index: int
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class WholeChatChoice(_ChatChoice):
    message: AssistantAnswer


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChunkChatChoice(_ChatChoice):
    delta: Delta


class CompletionTokensDetails(PredictionDetails):
    reasoning_tokens: int


class ChatUsage(Usage):
    completion_tokens_details: CompletionTokensDetails


class _ChatBody(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    seed: int
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    usage: ChatUsage | None = None
    timings: Timings | None = None


class ChatResponse(_ChatBody):
    object: Literal["chat.completion"]
    choices: list[WholeChatChoice]


class ChatChunk(_ChatBody):
    """One event of a stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChatChoice]
    metrics: dict[str, Any] | None = None


class RenderResponse(BaseModel):
    """The prompt and the token limit that the engine would be given."""

    prompt: str | None
    """The prompt's text; null where truncate_prompt_tokens cut it."""
    prompt_token_ids: list[int]
    count: int
    max_tokens: int
    max_model_len: int
