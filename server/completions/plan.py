"""The plan of a completion request: its prompts, sampling parameters and grammar."""

from msgspec.structs import replace

from server.core.prompts import PromptCut, encode_prompts
from server.generation.entry import Arrival
from server.generation.grammar import grammar_of
from server.generation.plan import GenerationPlan, ResponseNames, make_plan
from server.generation.prediction import predicted_token_ids
from server.generation.sampling import sampling_params
from server.protocol.completions import CompletionRequest
from server.runtime.backend import Backend

CompletionPlan = GenerationPlan[CompletionRequest]

_NAMES = ResponseNames("cmpl", "text_completion", "text_completion")


async def plan_completion(request: CompletionRequest, backend: Backend, arrival: Arrival) -> CompletionPlan:
    """Returns the plan of a request. Raises RequestError or BadRequestError for what the engine cannot be asked; the
    rest it refuses itself."""
    max_model_len = backend.engine.info.max_model_len
    wanted = request.max_tokens_behind(0, max_model_len)
    reserved = wanted if wanted < max_model_len else 1  # an answer that may fill the context ends with it
    cut = PromptCut.of(request, max_model_len - reserved)
    prompts = await encode_prompts(request.prompt, backend.tokenizer, request.add_special_tokens, cut)
    grammar = await grammar_of(request.constraint, backend.grammars, arrival.caller)
    predicted = await predicted_token_ids(request, backend.tokenizer, backend.engine.info)
    params = sampling_params(request, backend.defaults, backend.tokenizer, wanted, grammar)
    params = replace(params, predicted_token_ids=predicted)
    max_tokens = [request.max_tokens_behind(len(prompt.token_ids), max_model_len) for prompt in prompts]
    params_of_each = [params if each == wanted else replace(params, max_tokens=each) for each in max_tokens]
    return make_plan(request, prompts, params_of_each, _NAMES, backend, arrival)
