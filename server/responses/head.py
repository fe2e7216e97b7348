"""The fields of a response that are known from its beginning on: most of them echo the request, as OpenAI's do."""

from typing import Any

from server.chat.plan import ChatPlan
from server.generation.entry import Arrival
from server.protocol.response_tools import without_built_in
from server.protocol.responses import ResponsesRequest


def response_head(request: ResponsesRequest, plan: ChatPlan, arrival: Arrival) -> dict[str, Any]:
    params, reasoning = plan.generations[0].params, request.reasoning
    return {
        "id": f"resp_{arrival.request_id}",
        "object": "response",
        "created_at": plan.head["created"],
        "completed_at": None,
        "model": arrival.model,
        "system_fingerprint": plan.head["system_fingerprint"],
        "seed": plan.head["seed"],
        "error": None,
        "incomplete_details": None,
        "stop_reason": None,
        "background": False,
        "store": False,
        "previous_response_id": None,
        "service_tier": "default",
        "truncation": request.truncation,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata,
        "parallel_tool_calls": request.parallel_tool_calls,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
        "safety_identifier": request.safety_identifier,
        "temperature": params.temperature,
        "text": request.text.model_dump(by_alias=True, exclude_none=True),
        "tool_choice": _dumped(request.tool_choice),
        "tools": [tool.model_dump() for tool in without_built_in(request.tools)],
        "top_logprobs": request.top_logprobs,
        "top_p": params.top_p,
        "usage": None,
        "user": request.user,
    }


def _dumped(choice: Any) -> Any:
    return choice if isinstance(choice, str) else choice.model_dump(exclude_none=True)
