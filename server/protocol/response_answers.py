"""Response models of POST /v1/responses."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from server.protocol.answers import PromptTokensDetails, Timings
from server.protocol.chat import CompletionTokensDetails, TokenLogprob
from server.protocol.response_tools import ToolChoice

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    """Always empty: there are no built-in tools, whose citations these are."""
    logprobs: list[TokenLogprob]


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(BaseModel):
    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    """Always empty: the content has all of the thinking."""
    status: Status
    content: list[ReasoningText]


class OutputCall(BaseModel):
    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class OutputCustomCall(BaseModel):
    """A call of a custom tool."""

    id: str
    type: Literal["custom_tool_call"]
    status: Status
    call_id: str
    name: str
    namespace: str | None = None
    input: str


OutputItem = Annotated[OutputMessage | OutputReasoning | OutputCall | OutputCustomCall, Field(discriminator="type")]


class InputTokensDetails(PromptTokensDetails):
    cache_write_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class ResponseProblem(BaseModel):
    code: str
    message: str


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class EchoedReasoning(BaseModel):
    effort: str | None
    summary: str | None


class ResponseBody(BaseModel):
    """The whole response. A stream sends the events of OpenAI's API, the first and the last of which have it whole."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    model: str
    system_fingerprint: str
    seed: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseProblem | None
    incomplete_details: IncompleteDetails | None
    stop_reason: int | str | None
    """The stop token or stop string that ended the response, or "deadline" or "abort"."""
    output: list[OutputItem]
    usage: ResponseUsage | None
    timings: Timings | None = None
    background: Literal[False]
    store: Literal[False]
    previous_response_id: None
    service_tier: Literal["default"]
    truncation: Literal["disabled"]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: EchoedReasoning
    safety_identifier: str | None
    temperature: float
    text: dict[str, Any]
    tool_choice: ToolChoice
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    user: str | None
