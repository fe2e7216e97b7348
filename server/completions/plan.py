"""What a completion request asks of the engine: one generation per prompt and candidate."""

import time
import uuid
from dataclasses import dataclass

import msgspec

from engine.client import GenerationRequest
from server.backend import Backend
from server.completions.prompts import EncodedPrompt, encode_prompts
from server.completions.sampling import draw_seed, sampling_params, seed_of
from server.errors import BadRequestError
from server.protocol.completions import CompletionRequest


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """Generation number i is a candidate of prompt number i // request.num_candidates."""

    request: CompletionRequest
    response_id: str
    created: int
    model: str
    system_fingerprint: str
    seed: int
    prompts: list[EncodedPrompt]
    generations: list[GenerationRequest]

    def prompt_of(self, generation: int) -> EncodedPrompt:
        return self.prompts[generation // self.request.num_candidates]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def head(self) -> dict[str, str | int]:
        """The fields that every chunk and the whole response begin with."""
        return {
            "id": self.response_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "seed": self.seed,
        }


async def make_plan(
    request: CompletionRequest, backend: Backend, *, model: str, request_id: str, arrival_s: float
) -> CompletionPlan:
    """Raises RequestError or BadRequestError for what the engine cannot be asked; the rest it refuses itself."""
    seed = draw_seed() if request.seed is None else request.seed
    params = sampling_params(request, backend.defaults, backend.tokenizer, seed_of(seed, 0))
    prompts = await encode_prompts(request, backend.tokenizer, backend.engine.info.max_model_len)
    num_generations = len(prompts) * request.num_candidates
    if num_generations > backend.max_live:
        limit = f"{backend.max_live} that this server takes at once"
        param = "prompt" if len(prompts) > 1 else "n"
        raise BadRequestError(f"{num_generations} sequences in one request are more than the {limit}.", param)
    unique = uuid.uuid4().hex[:12]  # clients may send one request id several times
    return CompletionPlan(
        request=request,
        response_id=f"cmpl-{request_id}",
        created=int(time.time()),
        model=model,
        system_fingerprint=backend.fingerprint,
        seed=seed,
        prompts=prompts,
        generations=[
            GenerationRequest(
                request_id=f"cmpl-{unique}-{index}",
                prompt_token_ids=prompts[index // request.num_candidates].token_ids,
                params=msgspec.structs.replace(params, seed=seed_of(seed, index)),
                arrival_s=arrival_s,
                priority=request.priority,
                cache_salt=request.cache_salt,
            )
            for index in range(num_generations)
        ],
    )
