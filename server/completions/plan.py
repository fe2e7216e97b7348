"""The plan of a completion request: its prompts, sampling parameters and grammar."""

from server.core.prompts import encode_prompts, prompt_limit
from server.generation.entry import Arrival
from server.generation.grammar import grammar_of
from server.generation.plan import GenerationPlan, ResponseNames, make_plan
from server.generation.sampling import sampling_params
from server.protocol.completions import CompletionRequest
from server.runtime.backend import Backend

CompletionPlan = GenerationPlan[CompletionRequest]

_NAMES = ResponseNames("cmpl", "text_completion", "text_completion")


async def plan_completion(request: CompletionRequest, backend: Backend, arrival: Arrival) -> CompletionPlan:
    """Returns the plan of a request. Raises RequestError or BadRequestError for what the engine cannot be asked; the
    rest it refuses itself."""
    limit = prompt_limit(request.truncate_prompt_tokens, backend.engine.info.max_model_len - request.max_tokens)
    prompts = await encode_prompts(request.prompt, backend.tokenizer, request.add_special_tokens, limit)
    grammar = await grammar_of(request.constraint, backend.grammars, arrival.caller)
    params = sampling_params(request, backend.defaults, backend.tokenizer, request.max_tokens, grammar)
    return make_plan(request, prompts, params, _NAMES, backend, arrival)
