"""Response models that all generating endpoints share, for /openapi.json."""

from pydantic import BaseModel


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class PredictionDetails(BaseModel):
    """How many tokens of the request's prediction appeared in the answer, and how many did not. Both are there if the
    request has one."""

    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: PredictionDetails | None = None


class Timings(BaseModel):
    """Time that a request spent in each phase: queue + remote_prefill + prefill = ttft, and ttft + decode = e2e."""

    queue_ms: float
    remote_prefill_ms: float | None = None
    """Time in which a prefill server was asked for the prompt; absent if none was."""
    prefill_ms: float
    ttft_ms: float
    decode_ms: float
    itl_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    e2e_ms: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    prefill_chunks: int
    preemptions: int


class PromptLogprob(BaseModel):
    logprob: float
    rank: int | None
    decoded_token: str
