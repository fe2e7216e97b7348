"""The plan of a request: one generation for the engine per prompt and candidate, and limits on their number."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from engine.core.generation_request import GenerationRequest
from engine.core.sampling_params import SamplingParams
from server.core.errors import BadRequestError
from server.core.prompts import EncodedPrompt
from server.generation.entry import Arrival
from server.generation.sampling import draw_seed, seed_of
from server.protocol.generation import GenerationParams
from server.runtime.backend import AdmissionSize, Backend

MAX_SENT_IDS = 2**19  # allowed, bad and predicted tokens: they are sent to the engine, and checked, for each sequence
MAX_SCORES = 2**22  # logprobs of prompts and unstreamed answers: each takes memory until it is sent
_LOGPROB_BYTES = 100  # in the server's memory: some 70, and that of the token itself 200
_SCORED_TOKEN_BYTES = 400  # an output for itself, with its text
_TOKEN_BYTES = 128  # likewise, where outputs are joined: see `collect`

RequestT = TypeVar("RequestT", bound=GenerationParams)
RequestT_co = TypeVar("RequestT_co", bound=GenerationParams, covariant=True)


@dataclass(frozen=True, slots=True)
class ResponseNames:
    """The names that an endpoint's responses have: the prefix of their ids, and their `object`."""

    id_prefix: str
    object: str
    chunk_object: str


@dataclass(frozen=True, slots=True)
class GenerationPlan(Generic[RequestT_co]):
    """A request's prompts and generations. Generation i is a candidate of prompt i // request.num_candidates."""

    request: RequestT_co
    head: dict[str, str | int]
    """The fields that every chunk and the whole response begin with."""
    prompts: Sequence[EncodedPrompt]
    generations: Sequence[GenerationRequest]
    block_size: int | None
    """Tokens of the blocks that later prompts find; None where prompts are not cached."""
    num_logprobs: int
    """Log-probabilities that its sequences may collect before they are sent."""

    @property
    def answer_bytes(self) -> int:
        """Memory that the answer may take if it is not streamed, beyond that for the text of one sequence without
        log-probabilities: an answer of that alone, small beside the KV that computed it, never lacks memory."""
        lengths = [each.params.max_tokens for each in self.generations]
        if self.generations[0].params.logprobs is None:
            text_bytes = sum(lengths[1:]) * _TOKEN_BYTES
        else:
            text_bytes = sum(lengths) * _SCORED_TOKEN_BYTES
        return text_bytes + self.num_logprobs * _LOGPROB_BYTES

    def prompt_of(self, generation: int) -> EncodedPrompt:
        return self.prompts[generation // self.request.num_candidates]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)


def make_plan(
    request: RequestT,
    prompts: Sequence[EncodedPrompt],
    params: Sequence[SamplingParams],
    names: ResponseNames,
    backend: Backend,
    arrival: Arrival,
) -> GenerationPlan[RequestT]:
    """Returns the plan of a request, with the parameters of each prompt: those of all differ in `max_tokens` only.
    Raises BadRequestError for what the engine cannot be asked; the rest it refuses itself."""
    num_generations = len(prompts) * request.num_candidates
    _check_admission_size(prompts, num_generations, backend.admission_size, arrival.tenant.share)
    if len(request.resume_token_ids) > num_generations:
        raise BadRequestError("resume_token_ids has entries for more choices than there are.", "resume_token_ids")
    num_ids = len(params[0].allowed_token_ids or ()) + sum(map(len, params[0].bad_words))
    num_ids += len(params[0].predicted_token_ids)
    if num_generations * num_ids > MAX_SENT_IDS:
        raise _too_many(
            prompts, num_generations, f"{MAX_SENT_IDS // num_ids} that may have so many token ids and words"
        )
    of_each = [_num_logprobs(request, *each) for each in zip(params, prompts, strict=True)]
    if (num_logprobs := request.num_candidates * sum(of_each)) > MAX_SCORES:
        raise _too_many_logprobs(num_logprobs, params[0])
    seed = draw_seed() if request.seed is None else request.seed
    return GenerationPlan(
        request=request,
        head={
            "id": f"{names.id_prefix}-{arrival.request_id}",
            "object": names.chunk_object if request.stream else names.object,
            "created": int(time.time()),
            "model": arrival.model,
            "system_fingerprint": backend.fingerprint(arrival.adapter),
            "seed": seed,
        },
        prompts=prompts,
        generations=_generations(request, prompts, params, seed, arrival),
        block_size=backend.engine.info.block_size if backend.caches_prompts else None,
        num_logprobs=num_logprobs,
    )


def _check_admission_size(
    prompts: Sequence[EncodedPrompt], num_generations: int, size: AdmissionSize, share: float
) -> None:
    """Raises BadRequestError for more sequences or prompt tokens than the admission queue ever takes: they are admitted
    together, so an idle server would refuse them, too, and a retry could not help."""
    max_live, max_tokens = size.max_live(share), size.max_tokens(share)
    if num_generations > max_live:
        raise _too_many(prompts, num_generations, f"{max_live} that may come in together")
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts) * num_generations // len(prompts)
    if num_generations > 1 and num_tokens > max_tokens:
        message = f"{num_generations} sequences in one request have {num_tokens} prompt tokens together"
        raise BadRequestError(f"{message}, more than the {max_tokens} that may wait here.", _param_of(prompts))


def _too_many(prompts: Sequence[EncodedPrompt], num_generations: int, limit: str) -> BadRequestError:
    return BadRequestError(f"{num_generations} sequences in one request are more than the {limit}.", _param_of(prompts))


def _param_of(prompts: Sequence[EncodedPrompt]) -> str:
    """Returns the parameter that makes the sequences so many."""
    return "prompt" if len(prompts) > 1 else "n"


def _num_logprobs(request: GenerationParams, params: SamplingParams, prompt: EncodedPrompt) -> int:
    """Returns how many logprobs one sequence may collect before they are sent."""
    of_prompt = 0 if params.prompt_logprobs is None else len(prompt.token_ids) * (params.prompt_logprobs + 1)
    of_output = 0 if params.logprobs is None or request.stream else params.max_tokens * (params.logprobs + 1)
    return of_prompt + of_output


def _too_many_logprobs(num_logprobs: int, params: SamplingParams) -> BadRequestError:
    return BadRequestError(
        f"Up to {num_logprobs} log-probabilities in one response are more than the {MAX_SCORES} that it may have. "
        "Ask for fewer of them, of sequences or of tokens (max_tokens).",
        "logprobs" if params.prompt_logprobs is None else "prompt_logprobs",
    )


def _generations(
    request: GenerationParams,
    prompts: Sequence[EncodedPrompt],
    params: Sequence[SamplingParams],
    seed: int,
    arrival: Arrival,
) -> list[GenerationRequest]:
    prompt_of = [index for index in range(len(prompts)) for _ in range(request.num_candidates)]
    return [
        arrival.generation(
            prompts[prompt].token_ids,
            msgspec.structs.replace(params[prompt], seed=seed_of(seed, index)),
            repeats_prompt=index % request.num_candidates > 0,
            given_token_ids=request.resume_token_ids[index] if index < len(request.resume_token_ids) else (),
        )
        for index, prompt in enumerate(prompt_of)
    ]
