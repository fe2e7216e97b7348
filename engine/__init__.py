"""The inference engine: token ids in, token ids out; continuous batching over a paged KV cache, two phases apart.

Importing this imports no torch. `engine.engine.Engine` runs in-process and does.
"""

from engine.client.async_engine import AsyncEngine
from engine.client.interface import EngineClient, EngineObserver, GenerationRequest
from engine.core.batch import Phase, TokenLogprobs
from engine.core.config import EngineConfig, EngineInfo
from engine.core.errors import (
    ConfigError,
    ContextLengthError,
    EngineFailedError,
    EngineUnavailableError,
    InvalidParameterError,
    ModelError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
    TwostepError,
    UnsupportedModelError,
)
from engine.core.outputs import RequestOutput
from engine.core.request import FinishReason
from engine.core.sampling_params import SamplingParams
from engine.core.stats import PoolStats, RequestTimings, StepStats
from engine.text.tokenizer import Tokenizer

__all__ = [
    "AsyncEngine",
    "ConfigError",
    "ContextLengthError",
    "EngineClient",
    "EngineConfig",
    "EngineFailedError",
    "EngineInfo",
    "EngineObserver",
    "EngineUnavailableError",
    "FinishReason",
    "GenerationRequest",
    "InvalidParameterError",
    "ModelError",
    "OverloadedError",
    "Phase",
    "PoolStats",
    "RequestError",
    "RequestOutput",
    "RequestTimeoutError",
    "RequestTimings",
    "SamplingParams",
    "StepStats",
    "TokenLogprobs",
    "Tokenizer",
    "TwostepError",
    "UnsupportedModelError",
]
