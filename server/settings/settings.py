"""Every setting of the server, in one typed definition: a flag, an environment variable and a YAML key each.

Precedence: flag, then TWOSTEP_* variable, then YAML file, then default.
"""

import re
from importlib.resources import files
from os.path import expanduser
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from engine.client.admission import AdmissionLimits
from engine.core.config import MAX_SPECULATIVE_TOKENS, EngineConfig, StepLimits
from engine.core.errors import ConfigError
from engine.host.cache_home import cache_home
from server.settings.adapters import adapter_sources
from server.settings.settings_file import SettingsFile

EMBEDDED_MODEL = "embedded"
EMBEDDED_MODEL_DIR = files("engine") / "embedded_model"


def _split(value: Any) -> Any:
    """Returns the items of a list, which in an environment variable is one string with commas."""
    if isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    if not isinstance(value, (list, tuple)):
        raise ValueError("must be text or a list of texts: write numbers in quotes")
    return value


def _check_urls(urls: tuple[str, ...]) -> tuple[str, ...]:
    for url in urls:
        if not re.fullmatch(r"https?://[^/?#\s@:]+(:[0-9]{1,5})?/?|https?://\[[0-9a-fA-F:.]+\](:[0-9]{1,5})?/?", url):
            raise ValueError(f"{url} is no address of a server: write http://host:port")
    return urls


def _check_names(names: tuple[str, ...]) -> tuple[str, ...]:
    if not all(name.strip() for name in names):
        raise ValueError("a name must not be empty: leave it out for the model as it was given")
    return names


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
ModelNames = Annotated[Names, AfterValidator(_check_names)]
Urls = Annotated[Names, AfterValidator(_check_urls)]


def setting(group: str, default: Any, description: str, metavar: str | None = None, **constraints: Any) -> Any:
    """Returns a settings field with what --help shows of it: its group, its text and the name of its value."""
    extra: JsonDict = {"group": group, "metavar": metavar}
    return Field(default, description=description, json_schema_extra=extra, **constraints)


class _Environment(EnvSettingsSource):
    def __call__(self) -> dict[str, Any]:
        """Returns the environment's settings, without the address that Kubernetes puts into TWOSTEP_PORT for a Service
        named twostep."""
        values = super().__call__()
        if str(values.get("port")).startswith(("tcp://", "udp://")):
            del values["port"]
        return values


class Settings(BaseSettings):
    """The server's settings, validated. Each field is a flag, a TWOSTEP_* variable and a YAML key."""

    model_config = SettingsConfigDict(env_prefix="TWOSTEP_", env_ignore_empty=True, extra="forbid", frozen=True)

    config: Path | None = setting("Server", None, "YAML file with any of these settings.", "FILE")
    host: str = setting("Server", "127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
    port: int = setting("Server", 8000, "Port to listen on; 0 for a free one.", ge=0, le=65535)
    uds: Path | None = setting("Server", None, "Unix socket to listen on, instead of an address and a port.", "FILE")
    root_path: str | None = setting("Server", None, "Prefix of a proxy's URLs for this server, such as /llm.", "PATH")
    ssl_certfile: Path | None = setting("Server", None, "Certificate chain (PEM): serves HTTPS.", "FILE")
    ssl_keyfile: Path | None = setting("Server", None, "Its private key, if the chain's file has none.", "FILE")
    api_key: Names = setting("Server", (), "Key that clients must send. May be given several times.", "KEY")
    api_keys_file: Path | None = setting("Server", None, "YAML file of named API keys; read again on SIGHUP.", "FILE")
    fair_by: Literal["key", "address"] = setting("Server", "key", "Who shares the engine: API keys, or addresses.")
    share_prefix_cache: bool = setting("Server", False, "Share KV blocks of equal prompts between API keys, too.")
    allowed_origins: Names = setting(
        "Server", (), "Origin whose scripts may call (CORS); * for all. May be given several times.", "ORIGIN"
    )
    max_waiting: PositiveInt = setting("Server", 256, "Requests that may wait; more are refused with 429.")
    max_waiting_tokens: PositiveInt = setting("Server", 1_000_000, "Prompt tokens that may wait to be computed.")
    max_queue_time: PositiveFloat = setting(
        "Server", 60.0, "Seconds a request may wait to be scheduled; 429 when it would wait longer.", "SECONDS", le=1e6
    )
    max_body_bytes: ByteSize = setting("Server", ByteSize(8 * 2**20), "Largest request body.", "BYTES", gt=0)
    answer_memory_bytes: ByteSize = setting(
        "Server", ByteSize(2 * 2**30), "Memory for logprobs and choices of answers not streamed.", "BYTES", gt=0
    )
    max_header_bytes: ByteSize = setting("Server", ByteSize(64 * 2**10), "Largest request head.", "BYTES", gt=0)
    max_connections: PositiveInt = setting("Server", 4096, "Connections at once; one that asks for nothing makes room.")
    header_timeout: PositiveFloat = setting("Server", 15.0, "Seconds a request's head may take.", "SECONDS")
    body_timeout: PositiveFloat = setting("Server", 30.0, "Seconds a body may take, plus 1 per 16 KiB.", "SECONDS")
    stall_timeout: PositiveFloat = setting(
        "Server", 60.0, "Seconds a client may stop reading its stream.", "SECONDS", le=1e6
    )
    shutdown_timeout: float = setting("Server", 30.0, "Seconds running streams may go on at shutdown.", "SECONDS", ge=0)
    log_level: Literal["debug", "info", "warning", "error"] = setting("Server", "info", "What to log.")
    log_format: Literal["text", "json"] = setting("Server", "text", "How log lines are written.")
    otel: bool = setting("Server", False, "Export traces and metrics by OpenTelemetry, as OTEL_* variables say.")
    key_metrics: bool = setting("Server", False, "Show the metrics of all API keys to whoever reads /metrics.")
    metrics_alias: Literal["vllm", "none"] = setting("Server", "vllm", "Also export metrics under vLLM's names.")

    role: Literal["both", "prefill", "decode"] = setting(
        "Roles", "both", "Phase that this server is for: prefill computes prompts for decode servers, into --kv-store."
    )
    prefill_url: Urls = setting(
        "Roles", (), "Prefill server that a decode server asks for prompts. May be given several times.", "URL"
    )
    prefill_api_key: str | None = setting("Roles", None, "Key that the prefill servers want.", "KEY", min_length=1)
    prefill_min_tokens: PositiveInt = setting("Roles", 256, "Tokens to compute from which on a prompt is asked for.")
    prefill_timeout: PositiveFloat = setting("Roles", 60.0, "Seconds to wait for a prompt.", "SECONDS", le=1e6)

    model: str = setting(
        "Model",
        EMBEDDED_MODEL,
        "Checkpoint directory, GGUF file or Hugging Face hub id; owner/name:Q4_K_M is a GGUF file.",
    )
    served_model_name: ModelNames = setting("Model", (), "Name clients use. May be given several times.", "NAME")
    lora: Names = setting(
        "Model", (), "Adapter (LoRA), in PEFT's format: the name that clients use, and its directory.", "NAME=DIR"
    )
    max_loras: PositiveInt = setting("Model", 128, "Adapters loaded at once.")
    max_lora_rank: PositiveInt = setting("Model", 256, "Largest rank of an adapter.")
    allow_runtime_lora_updating: bool = setting(
        "Model", False, "Let clients load and unload adapters, from any directory that the server can read."
    )
    revision: str | None = setting("Model", None, "Branch, tag or commit on the hub.")
    trust_remote_code: bool = setting("Model", False, "Run Python code that the checkpoint brings.")
    load_format: Literal["auto", "dummy"] = setting(
        "Model", "auto", "dummy: random weights, made from config.json alone, to measure speed without a checkpoint."
    )
    generation_config: str = setting("Model", "auto", "Sampling defaults: auto (the model's), none, or a directory.")
    chat_template: str | None = setting("Model", None, "Chat template: a file or the text; default: the model's.")
    trust_request_chat_template: bool = setting("Model", False, "Let requests bring a chat_template of their own.")
    tool_call_parser: Literal["auto", "hermes", "llama3", "mistral", "json", "granite", "lfm2", "harmony", "none"] = (
        setting("Model", "auto", "How the model writes tool calls; auto asks its chat template.")
    )
    reasoning_parser: Literal["auto", "think", "none"] = setting(
        "Model", "auto", "How the model marks its thinking; auto asks its chat template."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting("Model", "auto", "Number format of the weights.")
    quantization: Literal["none", "fp8", "int8", "int4"] = setting(
        "Model", "none", "Weights of 8 or 4 bits; on the CPU activations are rounded to 8. fp8 is for GPUs."
    )
    gguf_activations: Literal["float32", "int8"] = setting(
        "Model", "float32", "int8: round what multiplies a GGUF file's integers to 8 bits, on the CPU; faster."
    )
    max_model_len: PositiveInt | None = setting(
        "Model", None, "Longest prompt + output; default: the model's limit, or what fits into the KV cache."
    )

    device: Literal["auto", "cpu", "cuda"] = setting("Engine", "auto", "Where to run.")
    num_threads: PositiveInt | None = setting("Engine", None, "CPU threads; default: torch's choice.")
    tensor_parallel_size: PositiveInt = setting(
        "Engine", 1, "Processes that compute the model together: threads are divided among them, or each has a GPU."
    )
    require_kernels: bool = setting(
        "Engine", False, "Refuse to start on the CPU without kernels, not serve many times slower."
    )
    enforce_eager: bool = setting("Engine", False, "Run without CUDA graphs, launching each kernel by itself.")
    max_num_seqs: PositiveInt | None = setting("Engine", None, "Requests running at once; default: 64, on a GPU 256.")
    max_num_batched_tokens: PositiveInt | None = setting(
        "Engine", None, "Tokens of a prefill step while nothing decodes; default: 2048, on a GPU 8192."
    )
    target_itl_ms: float | None = setting(
        "Engine",
        None,
        "Milliseconds between a stream's tokens that prompts of others may cause; default: 250, on a GPU 50.",
        "MS",
        ge=1,
        le=1e6,
    )
    max_prefill_tokens_per_gap: PositiveInt = setting(
        "Engine", 2048, "Prefill tokens between two decode steps, even if more are within the target."
    )
    block_size: PositiveInt = setting("Engine", 16, "Tokens per KV block.")
    free_window_blocks: bool = setting("Engine", True, "Give back KV blocks that no window sees any more, if possible.")
    kv_cache_dtype: Literal["auto", "bfloat16", "int8", "int4"] = setting(
        "Engine", "auto", "Number format of KV; auto: that of activations. 8 or 4 bits hold longer contexts."
    )
    kv_cache_memory_bytes: ByteSize | None = setting(
        "Engine",
        None,
        "Memory for KV, such as 2GiB; default: half of what is free, 4GiB at most; on a GPU nine tenths.",
        "BYTES",
        gt=0,
    )
    state_cache_memory_bytes: ByteSize | None = setting(
        "Engine",
        None,
        "Memory for copies of recurrent states, apart from that for KV; default: an eighth of that; 0: none.",
        "BYTES",
    )
    state_checkpoint_interval: PositiveInt = setting(
        "Engine", 512, "Tokens from one copy of recurrent states to the next, rounded up to whole blocks."
    )
    num_gpu_blocks_override: PositiveInt | None = setting(
        "Engine", None, "Exact number of KV blocks, on any device, instead of memory for them."
    )
    enable_prefix_caching: bool = setting("Engine", True, "Share KV blocks of equal prompt beginnings.")
    prefix_retention_share: float = setting(
        "Engine", 0.5, "Share of KV blocks that requests may have retained, which make room last.", "SHARE", ge=0, le=1
    )
    kv_store: str | None = setting(
        "Engine", None, "Directory where KV blocks are kept across restarts; several servers may share it.", "DIR"
    )
    kv_store_bytes: ByteSize = setting("Engine", ByteSize(16 * 2**30), "Size of its files together.", "BYTES", gt=0)
    packed_cache: str = setting(
        "Engine",
        "auto",
        "Directory where models are kept as the CPU kernels read them, for starts in seconds; auto: in ~/.cache; off.",
        "DIR",
    )
    packed_cache_bytes: ByteSize = setting("Engine", ByteSize(2 * 2**30), "Size of its files together.", "BYTES", gt=0)
    num_speculative_tokens: int = setting(
        "Engine",
        32,
        "Draft tokens of a request per step, 32 at most, however they are proposed; 0: none. Answers stay the same.",
        ge=0,
        le=MAX_SPECULATIVE_TOKENS,
    )
    draft_model: str | None = setting(
        "Engine", None, "Draft with this smaller model of the same tokenizer, or EAGLE-3 head; same answers.", "MODEL"
    )
    draft_quantization: Literal["none", "int8", "int4"] = setting(
        "Engine",
        "none",
        "Draft with a second copy of the weights, of 4 bits, on the CPU; or the quantization of --draft-model.",
    )
    mtp: bool = setting("Engine", True, "Draft with the checkpoint's own MTP head, if any. Answers stay the same.")
    engine_timeout: PositiveFloat = setting(
        "Engine", 120.0, "Seconds an engine with work may be silent; then it is killed and restarted.", "SECONDS"
    )
    spare_engine: bool = setting(
        "Engine", True, "Keep another engine process waiting, where there is memory, so that a restart is short."
    )
    max_engine_restarts: NonNegativeInt = setting("Engine", 5, "Restarts in a row, without a token, before giving up.")
    trace: str | None = setting("Engine", None, "File that receives one JSON line per step.", "FILE")

    @field_validator("model", "host", "generation_config")
    @classmethod
    def _not_empty(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("must not be empty")
        return value

    @field_validator("root_path")
    @classmethod
    def _of_plain_segments(cls, path: str | None) -> str | None:
        if path is not None and not re.fullmatch(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+", path):
            raise ValueError("must be a path of letters, digits, dots and dashes such as /llm, with no / at its end")
        return path

    @field_validator("allowed_origins")
    @classmethod
    def _as_browsers_send_them(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
                raise ValueError(f"{origin} is no origin: write https://example.org, with no path and no / at its end")
        return origins

    @model_validator(mode="after")
    def _one_size_of_the_kv_cache(self) -> Self:
        if self.num_gpu_blocks_override is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                "--num-gpu-blocks-override and --kv-cache-memory-bytes both size the KV cache: leave one out."
            )
        return self

    @model_validator(mode="after")
    def _what_a_role_needs(self) -> Self:
        if (self.role == "decode") != bool(self.prefill_url):
            raise ConfigError("--role decode and --prefill-url belong together: give both, or leave both out.")
        if self.role != "both" and self.kv_store is None:
            raise ConfigError(
                f"--role {self.role} needs --kv-store: a directory that prefill and decode servers share."
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = init_settings().get("config") or env_settings().get("config")
        return init_settings, _Environment(settings_cls), SettingsFile(settings_cls, path)

    @property
    def is_embedded_model(self) -> bool:
        return self.model == EMBEDDED_MODEL

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names under which clients may ask for the model; responses name the first one."""
        return self.served_model_name or (self.model,)

    def admission_limits(self) -> AdmissionLimits:
        """Returns the bounds of the admission queue."""
        return AdmissionLimits(
            max_waiting=self.max_waiting, max_waiting_tokens=self.max_waiting_tokens, max_queue_s=self.max_queue_time
        )

    def engine_config(self) -> EngineConfig:
        """Returns the settings that the engine process is started with. Raises ConfigError."""
        return _engine_config(self)


def _engine_config(settings: Settings) -> EngineConfig:
    return EngineConfig(
        model=str(EMBEDDED_MODEL_DIR) if settings.is_embedded_model else expanduser(settings.model),
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
        load_format=settings.load_format,
        device=settings.device,
        dtype=settings.dtype,
        quantization=settings.quantization,
        gguf_activations=settings.gguf_activations,
        adapters=adapter_sources(settings.lora, settings.model_names),
        max_adapters=settings.max_loras,
        max_adapter_rank=settings.max_lora_rank,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size,
        num_blocks=settings.num_gpu_blocks_override,
        free_window_blocks=settings.free_window_blocks,
        kv_cache_dtype=settings.kv_cache_dtype,
        kv_cache_bytes=None if settings.kv_cache_memory_bytes is None else int(settings.kv_cache_memory_bytes),
        state_cache_bytes=None if settings.state_cache_memory_bytes is None else int(settings.state_cache_memory_bytes),
        state_checkpoint_interval=settings.state_checkpoint_interval,
        **{name: getattr(settings, name) for name in StepLimits.__struct_fields__},
        max_prefill_tokens_per_gap=settings.max_prefill_tokens_per_gap,
        enable_prefix_caching=settings.enable_prefix_caching,
        prefix_retention_share=settings.prefix_retention_share,
        kv_store=settings.kv_store and expanduser(settings.kv_store),
        kv_store_bytes=int(settings.kv_store_bytes),
        packed_cache=_packed_cache(settings),
        packed_cache_bytes=int(settings.packed_cache_bytes),
        num_speculative_tokens=settings.num_speculative_tokens,
        draft_model=settings.draft_model and expanduser(settings.draft_model),
        draft_quantization=settings.draft_quantization,
        mtp=settings.mtp,
        enforce_eager=settings.enforce_eager,
        require_kernels=settings.require_kernels,
        num_threads=settings.num_threads,
        tensor_parallel_size=settings.tensor_parallel_size,
        trace=settings.trace and expanduser(settings.trace),
    )


def _packed_cache(settings: Settings) -> str | None:
    if settings.packed_cache == "off":
        return None
    return str(cache_home() / "packed") if settings.packed_cache == "auto" else expanduser(settings.packed_cache)
