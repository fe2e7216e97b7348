"""What Ollama's API tells of the model that is served, and of the adapters over it."""

import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from server.protocol.ollama import LoadedModel, ModelDescription, ModelDetails, OllamaModel
from server.runtime.backend import Backend

NEVER = "2318-01-01T00:00:00Z"
"""When the model makes room: Ollama itself says a time so far off for a model that is kept."""


def rfc3339(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def listed_model(name: str, model: str, backend: Backend) -> OllamaModel:
    """Returns the entry of one name. `model` is a name of the model itself, which adapters have as their parent."""
    info = backend.engine.info
    return OllamaModel(
        name=name,
        model=name,
        modified_at=rfc3339(backend.loaded_at),
        size=info.weight_bytes,
        digest=_digest(name, backend),
        details=_details(name, model, backend),
    )


def loaded_model(name: str, model: str, backend: Backend) -> LoadedModel:
    info = backend.engine.info
    size = info.weight_bytes + info.kv_cache_bytes
    return LoadedModel(
        name=name,
        model=name,
        size=size,
        digest=_digest(name, backend),
        details=_details(name, model, backend),
        expires_at=NEVER,
        size_vram=0 if info.device == "cpu" else size,
        context_length=info.max_model_len,
    )


def description(name: str, model: str, backend: Backend) -> ModelDescription:
    info, family = backend.engine.info, backend.engine.info.architecture
    return ModelDescription(
        modelfile="",
        parameters="\n".join(_parameters(backend)),
        template="",
        details=_details(name, model, backend),
        model_info={
            "general.architecture": family,
            f"{family}.context_length": info.max_model_len,
            f"{family}.embedding_length": info.hidden_size,
            f"{family}.vocab_size": info.vocab_size,
        },
        capabilities=list(_capabilities(backend)),
        modified_at=rfc3339(backend.loaded_at),
    )


def _parameters(backend: Backend) -> Iterable[str]:
    """Yields the sampling parameters of requests that leave them out, as a Modelfile writes them."""
    defaults = backend.defaults
    given: dict[str, Any] = {
        "temperature": defaults.temperature,
        "top_p": defaults.top_p,
        "top_k": defaults.top_k,
        "min_p": defaults.min_p,
        "repeat_penalty": defaults.repetition_penalty,
    }
    return (f"{name} {value}" for name, value in given.items())


def _capabilities(backend: Backend) -> Iterable[str]:
    yield "completion"
    if (dialect := backend.chat.server_dialect) is None:
        return
    if dialect.calls is not None:
        yield "tools"
    if dialect.thinks:
        yield "thinking"


def _details(name: str, model: str, backend: Backend) -> ModelDetails:
    info = backend.engine.info
    return ModelDetails(
        parent_model=model if name in backend.engine.adapters.loaded else "",
        format="",
        family=info.architecture,
        families=[info.architecture],
        parameter_size="",
        quantization_level=info.dtype,
    )


def _digest(name: str, backend: Backend) -> str:
    """Returns a hash of the model, with the adapter of this name if it is one's: equal for equal weights."""
    adapter = backend.engine.adapters.loaded.get(name)
    parts = (backend.engine.info.weights_fingerprint, "" if adapter is None else adapter.digest)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
