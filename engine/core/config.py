"""The engine's settings, frozen, and what was measured from them at start-up, a second value."""

import msgspec

from engine.core.errors import ConfigError
from engine.core.machine import Ceilings, ModelSize

MAX_SPECULATIVE_TOKENS = 32


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the engine process is told. Nothing is written back: see `EngineInfo` for measured values."""

    model: str
    """A checkpoint directory or a Hugging Face hub id."""
    revision: str | None = None
    trust_remote_code: bool = False
    device: str = "auto"
    """auto (cuda where available), cpu or cuda."""
    dtype: str = "auto"
    """auto, float32, bfloat16 or float16. auto: on the CPU bfloat16 where it is computed natively, else float32; on
    CUDA the checkpoint's own 16-bit type, else bfloat16."""
    quantization: str = "none"
    """none, int8 or int4: bits of the weights of linear layers and experts, on the CPU. Their inputs have 8, the
    head's 16."""
    draft_quantization: str = "none"
    """none or int4: a second copy of the weights that guesses tokens, on the CPU. See `engine.model.self_draft`."""
    max_model_len: int | None = None
    """Longest prompt + output; None takes the model's own limit."""
    block_size: int = 16
    """Tokens per KV block."""
    num_blocks: int | None = None
    """Exact number of KV blocks; None sizes the pool by kv_cache_bytes."""
    kv_cache_bytes: int | None = None
    """Memory for the KV cache; None takes a share of what is free after loading."""
    max_num_seqs: int = 64
    """Requests running at once."""
    max_num_batched_tokens: int = 2048
    """Tokens of one prefill step while nothing decodes."""
    target_itl_ms: float = 250.0
    """What a gap between two tokens of a stream may come to by prefill steps of others; see
    `engine.scheduling.prefill_budget`."""
    max_prefill_tokens_per_gap: int = 2048
    """Tokens of the one prefill step allowed between two decode steps, even if more would be within the target."""
    enable_prefix_caching: bool = True
    num_speculative_tokens: int = 8
    """Tokens that a request guesses in one step at most, where that pays; 0 for none. See
    `engine.scheduling.speculation.planner`."""
    num_threads: int | None = None
    """CPU threads of the model; None leaves torch's default."""
    trace: str | None = None
    """File that receives one JSON line per step that ran something."""

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_prefill_tokens_per_gap",
            "target_itl_ms",
        ):
            _check_positive(name, getattr(self, name))
        for name in ("max_model_len", "num_blocks", "kv_cache_bytes", "num_threads"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if not 0 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"num_speculative_tokens must be 0 to {MAX_SPECULATIVE_TOKENS}, got {self.num_speculative_tokens}."
            )
        _check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _check_choice("quantization", self.quantization, ("none", "int8", "int4"))
        _check_choice("draft_quantization", self.draft_quantization, ("none", "int4"))
        if self.draft_quantization == self.quantization != "none":
            raise ConfigError(
                f"--draft-quantization {self.draft_quantization} guesses no sooner than weights of as many bits do: "
                f"leave it out, or --quantization {self.quantization}."
            )
        if self.draft_quantization != "none" and self.num_speculative_tokens == 0:
            raise ConfigError("--draft-quantization needs --num-speculative-tokens to be at least 1.")
        _check_choice("device", self.device, ("auto", "cpu", "cuda"))


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine found out while loading."""

    model: str
    architecture: str
    device: str
    dtype: str
    attention: str
    """Name of the attention backend in use."""
    linear: str
    """Name of the matrix-product backend in use."""
    vocab_size: int
    max_model_len: int
    """The longest context: one of that length fits into the KV cache."""
    block_size: int
    num_blocks: int
    eos_token_ids: tuple[int, ...]
    weight_bytes: int
    kv_cache_bytes: int
    load_s: float
    size: ModelSize
    """What the model's steps read and multiply."""
    draft_size: ModelSize | None = None
    """What the weights that guess read and multiply; None without them."""
    ceilings: Ceilings
    """How fast the machine does that at best."""

    @property
    def kv_capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size


def _check_positive(name: str, value: float) -> None:
    if not value >= 1:  # nor is NaN
        raise ConfigError(f"{name} must be at least 1, got {value}.")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")
