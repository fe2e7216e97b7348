"""The engine's settings, `EngineConfig`, and what loading the model found out, `EngineInfo`; both frozen."""

import msgspec

from engine.core.adapters import AdapterInfo, AdapterSource
from engine.core.errors import ConfigError
from engine.core.kv_groups import ONE_GROUP, KVGroups
from engine.core.machine import Ceilings, ModelSize

MAX_SPECULATIVE_TOKENS = 32


class StepLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of steps whose defaults depend on the kind of device."""

    max_num_seqs: int
    """Maximum number of requests running at once."""
    max_num_batched_tokens: int
    """Maximum number of tokens of one prefill step while nothing decodes."""
    target_itl_ms: float
    """Longest gap between two tokens of a stream that prefill steps of other requests may cause; see
    `engine.scheduling.prefill_budget`."""


_ON_CPU = StepLimits(max_num_seqs=64, max_num_batched_tokens=2048, target_itl_ms=250.0)
_ON_CUDA = StepLimits(max_num_seqs=256, max_num_batched_tokens=8192, target_itl_ms=50.0)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of the engine process. Nothing is written back: see `EngineInfo` for measured values."""

    model: str
    """A checkpoint directory or a Hugging Face hub id."""
    revision: str | None = None
    trust_remote_code: bool = False
    load_format: str = "auto"
    """Where the weights come from: auto, the checkpoint's files, or dummy, random numbers, for which config.json
    suffices. See `engine.model.dummy_weights`."""
    tokenizer: str | None = None
    """A directory or hub id with the tokenizer; None for the model's own."""
    device: str = "auto"
    """Device of the model: auto (cuda where available), cpu or cuda."""
    dtype: str = "auto"
    """Type of weights and activations: auto, float32, bfloat16 or float16. auto: on the CPU bfloat16 where it is
    computed natively, else float32; on CUDA the checkpoint's own 16-bit type, else bfloat16."""
    quantization: str = "none"
    """Weight quantization of linear layers and experts: none, int8, int4, or on CUDA fp8. On the CPU their activations
    are quantized to 8 bits, those of the head to 16; on CUDA with fp8 alone."""
    gguf_activations: str = "float32"
    """What multiplies weights in the blocks of a GGUF file, on the CPU: float32, or int8, rows that are rounded to 8
    bits. See `engine.weights.activation_quantization`."""
    draft_model: str | None = None
    """A draft model: the directory or hub id of a smaller one with the same tokenizer. See
    `engine.model.drafting.draft_model`."""
    draft_quantization: str = "none"
    """Weight quantization of the draft model, on the CPU: none, int8 or int4. Without `draft_model` it is a second copy
    of the weights: none (no draft model) or int4. See `engine.model.drafting.self_draft`."""
    mtp: bool = True
    """Whether the checkpoint's own MTP head drafts, if it brings one and neither of the two above is set. See
    `engine.model.drafting.mtp_head`."""
    adapters: tuple[AdapterSource, ...] = ()
    """Adapters (LoRA) that are loaded with the model."""
    max_adapters: int = 128
    """Maximum number of adapters loaded at once."""
    max_adapter_rank: int = 256
    """Maximum rank of an adapter's modules."""
    max_model_len: int | None = None
    """Longest prompt + output, in tokens; None takes the model's own limit."""
    block_size: int = 16
    """Tokens per KV block."""
    num_blocks: int | None = None
    """Exact number of KV blocks; None sizes the pool by kv_cache_bytes."""
    free_window_blocks: bool = True
    """Whether layers that see a window of the context give back the blocks before it, where that is possible: see
    `engine.runner.window_groups`."""
    kv_cache_dtype: str = "auto"
    """Format of the KV cache: auto (that of activations), bfloat16, int8 or int4. See
    `engine.attention.kv_format`."""
    kv_cache_bytes: int | None = None
    """Memory for the KV cache; None takes a share of what is free after loading."""
    state_cache_bytes: int | None = None
    """Memory for copies of recurrent states, from which requests with an equal beginning go on; None takes an eighth of
    the memory for KV and states."""
    state_checkpoint_interval: int = 512
    """Tokens from one such copy of a text's states to the next, rounded up to whole blocks."""
    max_num_seqs: int | None = None
    """See `StepLimits`, as for the next two; None takes the default of the device."""
    max_num_batched_tokens: int | None = None
    target_itl_ms: float | None = None
    max_prefill_tokens_per_gap: int = 2048
    """Maximum number of tokens of the one prefill step allowed between two decode steps, even if more would be within
    `target_itl_ms`."""
    enable_prefix_caching: bool = True
    prefix_retention_share: float = 0.5
    """Share of the KV blocks that requests may have retained, of which those that are free or cached last make room."""
    kv_store: str | None = None
    """Directory of the KV store: full blocks are kept in its files, where later engines find them; None for none."""
    kv_store_bytes: int = 16 << 30
    """Size of the KV store's files together, at most."""
    packed_cache: str | None = None
    """Directory of packed models: one that is kept there is read instead of loaded; None for none. See
    `engine.model.packed_cache`."""
    packed_cache_bytes: int = 2 << 30
    """Size of the packed models together, at most."""
    num_speculative_tokens: int = 32
    """Maximum number of draft tokens of a request in one step, proposed where that pays; 0 disables speculative
    decoding. See `engine.scheduling.speculation.planner`."""
    enforce_eager: bool = False
    """Whether steps on CUDA run without CUDA graphs, launching each kernel by itself."""
    require_kernels: bool = False
    """Whether to refuse to load on the CPU without the C++ kernels, where torch would compute many times slower."""
    num_threads: int | None = None
    """CPU threads of the model, of all its ranks together; None leaves torch's default."""
    tensor_parallel_size: int = 1
    """Number of ranks: processes of this host that compute the model together, on its CPUs or each on a GPU. See
    `engine.model.tensor_parallel`."""
    trace: str | None = None
    """File that receives one JSON line per step that ran something."""

    @property
    def may_load_head(self) -> bool:
        """Whether a checkpoint's MTP head is to draft. Random weights have none."""
        if self.load_format == "dummy":
            return False
        has_other = self.draft_model is not None or self.draft_quantization != "none"
        return self.mtp and self.num_speculative_tokens > 0 and not has_other

    @property
    def is_self_speculative(self) -> bool:
        """Whether the model's own weights are to draft, rounded to fewer bits."""
        return self.draft_model is None and self.draft_quantization != "none"

    @property
    def checkpoint_tokens(self) -> int:
        """Tokens from one copy of a text's recurrent states to the next, a multiple of the block size."""
        return -(-self.state_checkpoint_interval // self.block_size) * self.block_size

    def limits_on(self, device: str) -> StepLimits:
        """Returns the limits on a device, such as cpu or cuda:0: those that are set, and the defaults of its kind."""
        default = _ON_CUDA if device.startswith("cuda") else _ON_CPU
        given = {name: value for name in default.__struct_fields__ if (value := getattr(self, name)) is not None}
        return msgspec.structs.replace(default, **given)

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "state_checkpoint_interval",
            "max_adapters",
            "max_adapter_rank",
            "max_prefill_tokens_per_gap",
            "kv_store_bytes",
            "packed_cache_bytes",
            "tensor_parallel_size",
        ):
            _check_positive(name, getattr(self, name))
        if not 0 <= self.prefix_retention_share <= 1:
            raise ConfigError(f"prefix_retention_share must be 0 to 1, got {self.prefix_retention_share}.")
        if self.kv_store is not None and not self.enable_prefix_caching:
            raise ConfigError("--kv-store needs prefix caching: leave out --no-enable-prefix-caching.")
        if self.kv_store is not None and self.tensor_parallel_size > 1:
            raise ConfigError("--kv-store: no file keeps the KV of several ranks yet; leave it out.")
        for name in ("max_model_len", "num_blocks", "kv_cache_bytes", "num_threads", *StepLimits.__struct_fields__):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if not 0 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"num_speculative_tokens must be 0 to {MAX_SPECULATIVE_TOKENS}, got {self.num_speculative_tokens}."
            )
        if self.state_cache_bytes is not None and self.state_cache_bytes < 0:
            raise ConfigError(f"state_cache_bytes must be at least 0, got {self.state_cache_bytes}.")
        _check_choice("load_format", self.load_format, ("auto", "dummy"))
        _check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _check_choice("quantization", self.quantization, ("none", "fp8", "int8", "int4"))
        _check_choice("gguf_activations", self.gguf_activations, ("float32", "int8"))
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, ("auto", "bfloat16", "int8", "int4"))
        self._check_drafts()
        _check_choice("device", self.device, ("auto", "cpu", "cuda"))
        if self.device != "auto":
            self.check_device(self.device)

    def check_device(self, device: str) -> None:
        """Raises ConfigError for a setting that does not work on this kind of device, cpu or cuda."""
        if device == "cpu":
            if self.quantization == "fp8":
                raise ConfigError("--quantization fp8 runs on GPUs only; on the CPU, int8 is as small and rounds less.")
            if self.dtype == "float16":
                raise ConfigError("--dtype float16 is not supported on the CPU; use bfloat16 or float32.")
            return
        for flag, value, everywhere in (
            ("--gguf-activations", self.gguf_activations, ("float32",)),
            ("--draft-quantization", self.draft_quantization, ("none",)),
            ("--kv-store", self.kv_store, (None,)),
        ):
            if value not in everywhere:
                raise ConfigError(f"{flag} {value} runs on the CPU only; use --device cpu or leave it out.")

    def _check_drafts(self) -> None:
        _check_choice("draft_quantization", self.draft_quantization, ("none", "int8", "int4"))
        if self.load_format == "dummy" and self.draft_model is not None:
            raise ConfigError("--draft-model: no draft is right about random weights; leave out it or --load-format.")
        if self.draft_model is None and self.draft_quantization == "int8":
            raise ConfigError(
                "--draft-quantization int8 is for a --draft-model: of the model's own weights use int4, or none."
            )
        if self.draft_model is None and self.draft_quantization == self.quantization != "none":
            raise ConfigError(
                f"--draft-quantization {self.draft_quantization} drafts no faster than weights of as many bits do: "
                f"leave it out, or --quantization {self.quantization}."
            )
        if self.num_speculative_tokens == 0:
            for flag, is_given in (
                ("--draft-quantization", self.draft_quantization != "none"),
                ("--draft-model", self.draft_model is not None),
            ):
                if is_given:
                    raise ConfigError(f"{flag} needs --num-speculative-tokens to be at least 1.")


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the loaded model and its KV cache, and the machine's measured peaks."""

    model: str
    architecture: str
    load_format: str = "auto"
    """Where the weights came from: auto, the checkpoint's files, or dummy, random numbers."""
    device: str
    dtype: str
    kv_cache_dtype: str
    """Format of the KV cache: the model's own type, or bfloat16, int8 or int4."""
    attention: str
    """Name of the attention backend in use."""
    linear: str
    """Name of the GEMM backend of linear layers in use."""
    tensor_parallel_size: int = 1
    """Number of ranks that compute the model together."""
    forward: str
    """What computes a step: `kernels`, in one call into C++, or `transformers`, by the model's own code there."""
    computing_libraries: str = ""
    """Versions of what computes, and the kind of GPU or CPU where the numbers depend on it."""
    vocab_size: int
    hidden_size: int
    """Numbers in an embedding."""
    max_model_len: int
    """Longest prompt + output, in tokens: a context of that length fits into the KV cache."""
    block_size: int
    num_blocks: int
    eos_token_ids: tuple[int, ...]
    weights_fingerprint: str
    """Hash of the model's configuration and of all its numbers, as they were loaded. Directories with equal weights
    have equal ones."""
    adapters: dict[str, AdapterInfo] = {}
    """The adapters that were loaded with the model, by name."""
    weight_bytes: int
    kv_cache_bytes: int
    kv_bytes_per_token: int
    """Bytes of the keys and values of one token, over all layers."""
    kv_groups: KVGroups = ONE_GROUP
    """The groups of attention layers, each of which has blocks of its own."""
    max_kv_bytes_per_context: int = 0
    """The most bytes of KV that a context of `max_model_len` tokens holds."""
    num_state_slots: int | None = None
    """Number of requests whose recurrent states fit into memory: no more run at once. None for models without any."""
    state_bytes_per_request: int = 0
    num_state_checkpoints: int = 0
    """Number of copies of such states that are kept for later requests, each of as many bytes."""
    state_checkpoint_tokens: int = 0
    """Tokens from one such copy of a text's states to the next, a multiple of the block size; 0 without any."""
    load_s: float
    size: ModelSize
    """Bytes and operations of the model's steps."""
    draft_size: ModelSize | None = None
    """Bytes and operations of the draft model's passes; None without a draft model."""
    draft_kv_bytes: int = 0
    """The part of `kv_cache_bytes` that is the draft model's own, with the hidden states that a head reads."""
    has_head: bool = False
    """Whether the draft model is a head: the checkpoint's for MTP, or one for EAGLE-3."""
    kv_fingerprint: str = ""
    """Hash of all that the KV of a token depends on beside the tokens; empty without a KV store that can be used."""
    hidden_fingerprint: str = ""
    """Hash of what hidden states that are kept for a head depend on beside the model."""
    ceilings: Ceilings
    """The machine's measured peaks of memory bandwidth and compute."""

    @property
    def can_cache_prefixes(self) -> bool:
        """Whether a request could go on from what another began with: with recurrent states, from copies of them."""
        return self.num_state_slots is None or self.num_state_checkpoints > 0

    @property
    def prefix_step(self) -> int:
        """Tokens of which every beginning of a text that a request can go on from is a multiple."""
        return self.state_checkpoint_tokens or self.block_size

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens whose KV fits into all blocks, if no layer gives any back."""
        return self.num_blocks // self.kv_groups.num_groups * self.block_size


def _check_positive(name: str, value: float) -> None:
    if not value >= 1:  # nor is NaN
        raise ConfigError(f"{name} must be at least 1, got {value}.")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")
