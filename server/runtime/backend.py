"""The loaded model as the server uses it: engine, tokenizer, sampling defaults."""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from engine.checkpoint.adapters.settings import read_settings as read_adapter_settings
from engine.checkpoint.hub import look_for_hub
from engine.checkpoint.local import check_checkpoint, is_local
from engine.checkpoint.pinning import pinned
from engine.checkpoint.weight_files import check_weights
from engine.client.interface import EngineClient
from engine.client.observer import EngineObserver
from engine.client.prefill_servers import NO_SERVERS, PrefillServers
from engine.client.tenant_quotas import max_tenant_places, max_tenant_tokens
from engine.core.config import EngineConfig, EngineInfo
from engine.core.errors import ConfigError
from engine.grammar.checker import GrammarChecker
from engine.host.memory_trim import trim_after_startup
from engine.kv_store.directory import check_store
from engine.process.first_process import FirstProcess
from engine.scheduling.cost.step_trace import check_trace_file
from server.core.tokenizer_protocol import Tokenizer
from server.core.version import VERSION
from server.runtime.dummy_tokenizer import with_tokenizer
from server.runtime.generation_defaults import GenerationDefaults, load_generation_defaults
from server.settings.settings import Settings
from server.templates.render import ChatRenderer
from server.templates.setting import load_chat_renderer, read_template


@dataclass(frozen=True, slots=True)
class AdmissionSize:
    """Size of the admission queue: sequences that may run at once, sequences that may wait, and prompt tokens that may
    wait."""

    num_slots: int
    max_waiting: int
    max_waiting_tokens: int

    def max_live(self, share: float) -> int:
        """Returns the most sequences that an API key with this share can have at once. A request for more could never
        be admitted."""
        return max_tenant_places(share, self.num_slots, self.max_waiting)

    def max_tokens(self, share: float) -> int:
        """Returns the most prompt tokens that several sequences of one request may have together."""
        return max_tenant_tokens(share, self.max_waiting_tokens)


@dataclass(frozen=True, slots=True)
class Backend:
    """The loaded model: its engine, and what the server needs beside it."""

    engine: EngineClient
    tokenizer: Tokenizer
    chat: ChatRenderer
    defaults: GenerationDefaults
    admission_size: AdmissionSize
    grammars: GrammarChecker
    caches_prompts: bool = True
    """Whether later prompts find what a prompt began with."""
    loaded_at: int = field(default_factory=lambda: int(time.time()))
    """Unix time at which the model was loaded; `created` in the list of models."""

    def fingerprint(self, adapter: str = "") -> str:
        """Returns OpenAI's `system_fingerprint`, of the model as it is or with the adapter of this digest. Servers with
        equal fingerprints give equal responses to equal seeds."""
        info = self.engine.info
        parts = (
            VERSION,
            info.architecture,
            info.weights_fingerprint,
            info.device,
            info.dtype,
            info.kv_cache_dtype,
            info.attention,
            info.linear,
            info.forward,
            info.computing_libraries,
            *filter(None, [adapter]),
        )
        return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]


MAX_CONTEXTS = 8
"""Longest text that is tokenized, in contexts of the model; also where the prompt would be truncated, since tokenizing
alone would take too long."""

OpenBackend = Callable[[EngineObserver], AbstractAsyncContextManager[Backend]]
"""Returns a context that loads the model on entry, raising ConfigError or ModelError, and stops the engine, with all
its requests, on exit."""


class BackendOpener(Protocol):
    """An `OpenBackend` that goes on with the first engine process, if that was spawned before."""

    def __call__(
        self, observer: EngineObserver, first: FirstProcess | None = None
    ) -> AbstractAsyncContextManager[Backend]: ...


def backend_opener(settings: Settings) -> BackendOpener:
    """Returns the opener of an engine process for the model of the settings. Raises ConfigError or ModelError for what
    can be refused before any library is imported."""
    config = settings.engine_config()
    check_checkpoint(config.model)
    if config.load_format == "auto":
        check_weights(config.model)
    if config.draft_model is not None:
        check_checkpoint(config.draft_model, is_draft=True)
        check_weights(config.draft_model)
    for adapter in config.adapters:
        read_adapter_settings(Path(adapter.path))
    _check_revision(settings, config.model)
    read_template(settings)
    if is_local(config.model) or settings.generation_config != "auto":
        load_generation_defaults(settings.generation_config, config.model, config.revision)
    if not is_local(config.model):
        look_for_hub(config.model)
    if config.trace:
        check_trace_file(config.trace)
    if config.kv_store:
        check_store(config.kv_store)
    return partial(_open_backend, settings, config)


def _check_revision(settings: Settings, model: str) -> None:
    if settings.revision is not None and is_local(model):
        what = "the embedded model comes with twostep" if settings.is_embedded_model else f"{model} is on this machine"
        raise ConfigError(f"--revision names a branch, tag or commit on the hub, and {what}: leave it out.")


@asynccontextmanager
async def _open_backend(
    settings: Settings, config: EngineConfig, observer: EngineObserver, first: FirstProcess | None = None
) -> AsyncGenerator[Backend, None]:
    # Importing these takes a while: the port is open, and --help has answered, long before.
    from engine.client.async_engine import AsyncEngine

    config = with_tokenizer(await asyncio.to_thread(pinned, config))
    grammars, servers = GrammarChecker(), _prefill_servers(settings)
    engine = AsyncEngine(
        config,
        limits=settings.admission_limits(),
        observer=observer,
        max_silence_s=settings.engine_timeout,
        max_restarts=settings.max_engine_restarts,
        keeps_spare=settings.spare_engine,
        first=first,
        prefill_servers=servers,
    )
    try:
        await engine.spawn()
        from engine.text.tokenizer import Tokenizer as EngineTokenizer

        defaults = await asyncio.to_thread(
            load_generation_defaults, settings.generation_config, config.model, config.revision
        )
        tokenizer = await asyncio.to_thread(
            EngineTokenizer.from_pretrained,
            config.tokenizer or config.model,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
        )
        chat = await load_chat_renderer(tokenizer, settings)
        trim_after_startup()  # while the engine loads
        tokenizer.max_tokens = MAX_CONTEXTS * (info := await engine.start(tokenizer)).max_model_len
        size = _admission_size(settings, config.limits_on(info.device).max_num_seqs)
        yield Backend(engine, tokenizer, chat, defaults, size, grammars, _caches_prompts(config, info))
    finally:
        grammars.close()
        await engine.stop()
        await servers.close()


def _caches_prompts(config: EngineConfig, info: EngineInfo) -> bool:
    return config.enable_prefix_caching and info.can_cache_prefixes


def _admission_size(settings: Settings, max_num_seqs: int) -> AdmissionSize:
    return AdmissionSize(max_num_seqs, settings.max_waiting, settings.max_waiting_tokens)


def _prefill_servers(settings: Settings) -> PrefillServers:
    if settings.role != "decode":
        return NO_SERVERS
    from server.runtime.prefill_servers import HttpPrefillServers

    terms = (settings.prefill_api_key, settings.prefill_min_tokens, settings.prefill_timeout)
    return HttpPrefillServers(settings.prefill_url, *terms)
