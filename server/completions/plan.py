"""What a completion request asks of the engine."""

from server.backend import Backend
from server.completions.prompts import encode_prompts
from server.generation.door import Arrival
from server.generation.plan import GenerationPlan, ResponseNames, make_plan
from server.protocol.completions import CompletionRequest

CompletionPlan = GenerationPlan[CompletionRequest]

_NAMES = ResponseNames("cmpl", "text_completion", "text_completion")


async def plan_completion(request: CompletionRequest, backend: Backend, arrival: Arrival) -> CompletionPlan:
    """Raises RequestError or BadRequestError for what the engine cannot be asked; the rest it refuses itself."""
    prompts = await encode_prompts(request, backend.tokenizer, backend.engine.info.max_model_len)
    return make_plan(request, prompts, request.max_tokens, _NAMES, backend, arrival)
