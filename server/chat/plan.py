"""The plan of a chat request: its rendered prompt, sampling parameters and grammar."""

import msgspec

from server.chat.answer import AnswerFormat, expected_answer
from server.chat.constraint import chat_grammar
from server.chat.omitted_images import log_omitted_images
from server.core.prompts import EncodedPrompt, PromptCut
from server.generation.entry import Arrival
from server.generation.plan import GenerationPlan, ResponseNames, make_plan
from server.generation.prediction import predicted_token_ids
from server.generation.sampling import sampling_params
from server.protocol.chat import ChatRequest
from server.runtime.backend import Backend

ChatPlan = GenerationPlan[ChatRequest]

_NAMES = ResponseNames("chatcmpl", "chat.completion", "chat.completion.chunk")


async def plan_chat(
    request: ChatRequest, backend: Backend, arrival: Arrival, shortens: bool = False
) -> tuple[ChatPlan, AnswerFormat]:
    """Returns the plan of a request, and how its answer is parsed. If it `shortens`, an answer may end with the context
    before it has as many tokens as the request allows. Raises RequestError or BadRequestError for what the engine
    cannot be asked; the rest it refuses itself."""
    log_omitted_images(request, arrival.request_id)
    prompt = await chat_prompt(request, backend)
    left = _tokens_left(backend.engine.info.max_model_len, len(prompt.token_ids))
    wanted = left if request.token_limit is None else request.token_limit
    max_tokens = min(wanted, left) if shortens else wanted
    answer = expected_answer(request, backend.chat.dialect_for(request), prompt.token_ids, backend.tokenizer)
    grammar = await chat_grammar(request, answer, backend.grammars, arrival.caller)
    params = msgspec.structs.replace(
        sampling_params(request, backend.defaults, backend.tokenizer, max_tokens, grammar),
        predicted_token_ids=await predicted_token_ids(request, backend.tokenizer, backend.engine.info),
        shown_token_ids=answer.shown_token_ids,
        thinking=answer.thinking_budget(request.thinking_token_budget),
    )
    return make_plan(request, [prompt], [params], _NAMES, backend, arrival), answer


async def chat_prompt(request: ChatRequest, backend: Backend) -> EncodedPrompt:
    """Returns the rendered prompt, truncated if the request allows that."""
    num_wanted = 1 if request.token_limit is None else request.token_limit
    cut = PromptCut.of(request, backend.engine.info.max_model_len - num_wanted)
    return cut.apply(await backend.chat.encode(request))


def _tokens_left(max_model_len: int, num_prompt_tokens: int) -> int:
    """Returns how many tokens fit behind the prompt: at least one, so that a prompt too long is refused as that."""
    return max(1, max_model_len - num_prompt_tokens)
