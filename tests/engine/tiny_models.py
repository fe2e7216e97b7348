"""Tiny random checkpoints of every architecture, and engines over them."""

import itertools
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from engine.assembly import assemble
from engine.attention import AttentionBackend, select_backend
from engine.attention.kv_cache import KVCache
from engine.core.adapters import AdapterSource
from engine.core.batch import Batch, StepOutput
from engine.core.config import EngineConfig
from engine.core.draft import Drafter
from engine.engine import Engine
from engine.grammar.compiler import GrammarCompiler, GrammarQueue, Grammars, make_tokenizer
from engine.host.shared_pages import SharedPages
from engine.kernels import load_kernels
from engine.kv_store.block_records import open_records
from engine.kv_store.opening import open_store
from engine.mixers.state import StateCache
from engine.model.adapters import ModelAdapters
from engine.model.drafting.proposal import draft_forward, proposer_of
from engine.model.forward_choice import choose_forward
from engine.model.known.text_models import register_language_model
from engine.model.loader import load_model
from engine.model.text_part import TEXT_PART_NAMES
from engine.runner.loaded_model import LoadedModel
from engine.runner.model_runner import ModelRunner
from engine.runner.window_groups import window_groups
from engine.scheduling.speculation.prompt_lookup import PromptLookup
from tests.engine.compressed_configs import COMPRESSED_CONFIGS
from tests.engine.fakes import fake_info
from tests.engine.further_configs import FURTHER, HYBRIDS, RECURRENT
from tests.engine.gemma4_configs import GEMMA4
from tests.engine.head_configs import HEAD_CONFIGS
from tests.engine.relative_configs import RELATIVE_CONFIGS
from tests.engine.sparse_configs import SPARSE_CONFIGS
from tests.engine.stream_configs import STREAM_CONFIGS

VOCAB_SIZE = 199
NUM_STATE_COPIES = 8
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_WINDOW = {"sliding_window": 12}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SIGMOIDS = {
    **{"n_routed_experts": 8, "num_local_experts": 8, "n_shared_experts": 2, "n_group": 4, "topk_group": 2},
    **{"first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True, **_MOE},
}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_TWO_WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], **_WINDOW}
_GPT = {"num_key_value_heads": 4}
# name -> (config class, its own settings)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "max_window_layers": 1, **_WINDOW}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mistral": ("MistralConfig", {"head_dim": 12, **_WINDOW}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "query_pre_attn_scalar": 16, **_WINDOW}),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2, **_WINDOW},
    ),
    "phi3": ("Phi3Config", dict(_WINDOW)),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.5}),
    "starcoder2": ("Starcoder2Config", dict(_WINDOW)),
    "starcoder2_mqa": ("Starcoder2Config", {"num_key_value_heads": 1}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 4, "head_dim": 16, **_MOE}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, **_WINDOW}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            **_MOE,
        },
    ),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "olmo2": ("Olmo2Config", {}),
    "granite": (
        "GraniteConfig",
        {
            **{"embedding_multiplier": 3.3, "attention_multiplier": 0.3},
            **{"residual_multiplier": 0.7, "logits_scaling": 3.0},
        },
    ),
    "cohere": ("CohereConfig", {}),
    "stablelm": ("StableLmConfig", {}),
    "smollm3": ("SmolLM3Config", {}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "head_dim": 16,
            **{"linear_key_head_dim": 12, "linear_value_head_dim": 20},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        },
    ),
    "granite4": (
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 12, "mamba_n_groups": 2},
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
        },
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            **{"linear_head_dim": 12, "linear_num_heads": 4, "num_experts": 4, "num_experts_per_token": 2},
            **{"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8},
            **{"v_head_dim": 10, "model_max_length": 256},
            **{"num_key_value_heads": 4, "moe_intermediate_size": 24, "num_expert_group": 1, "topk_group": 1},
        },
    ),
    "jamba": (
        "JambaConfig",
        {
            **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
            **{"mamba_d_state": 6, "mamba_dt_rank": 5, "num_experts": 4, "num_experts_per_tok": 2},
        },
    ),
    "smollm3_nope": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1]}),
    "phi3_partial": ("Phi3Config", {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.75}, **_WINDOW}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 12}),
    "olmo3": ("Olmo3Config", _TWO_WINDOWS),
    "exaone4": ("Exaone4Config", _TWO_WINDOWS),
    "glm": ("GlmConfig", {"head_dim": 12}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "ernie4_5": ("Ernie4_5Config", {"use_bias": True}),
    "cohere2": ("Cohere2Config", {"logit_scale": 0.3, **_TWO_WINDOWS}),
    "gemma1": ("GemmaConfig", {"head_dim": 16}),
    "ministral": ("MinistralConfig", {"head_dim": 12, **_TWO_WINDOWS}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {"num_experts": 4, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1], **_MOE},
    ),
    "glm4_moe": ("Glm4MoeConfig", {"head_dim": 12, "use_qk_norm": True, **_SIGMOIDS, "num_experts_per_tok": 3}),
    "dots1": ("Dots1Config", dict(_SIGMOIDS)),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2},
    ),
    "hunyuan_moe": ("HunYuanMoEV1Config", {"num_experts": 4, "moe_topk": 2, "head_dim": 12}),
    "hunyuan": (
        "HunYuanDenseV1Config",
        {"head_dim": 12, "rope_parameters": {**_ROPE, "rope_type": "dynamic", "factor": 1.0, "alpha": 3.0}},
    ),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 12,
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
                **{"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.9},
            },
        },
    ),
    "nemotron": ("NemotronConfig", {"head_dim": 12}),
    "arcee": ("ArceeConfig", {"mlp_bias": True}),
    **GEMMA4,
    **FURTHER,
    **RECURRENT,
    **HYBRIDS,
    **SPARSE_CONFIGS,
    **COMPRESSED_CONFIGS,
    **RELATIVE_CONFIGS,
    **STREAM_CONFIGS,
    **HEAD_CONFIGS,
}
_OF_STATES = {"lfm2", "qwen3_5", "granite4", "kimi_linear", "glm5_next", "jamba", "zaya"}
WITH_STATES = frozenset({*_OF_STATES, *RECURRENT, *HYBRIDS, *RELATIVE_CONFIGS, *STREAM_CONFIGS})
"""Those with recurrent states, which allow for no draft model made of their own weights."""
SPARSE = frozenset(SPARSE_CONFIGS)
"""Those with attention to 8 chosen positions."""
ALIKE = frozenset(
    {
        *("gemma1", "ministral", "olmoe", "qwen2_moe", "dots1", "ernie4_5_moe", "hunyuan", "hunyuan_moe", "nemotron"),
        *("arcee", *FURTHER, *HYBRIDS),
    }
)
"""Those whose parts are nearly all those of others, so that most tests of them are slow."""
RARE = frozenset({*SPARSE_CONFIGS, *COMPRESSED_CONFIGS, *RELATIVE_CONFIGS, *STREAM_CONFIGS, *HEAD_CONFIGS})
"""Those with parts that few others have and that take long: these parts have quick tests, and most others are slow."""
QUICK = frozenset(ARCHITECTURES) - ALIKE - RARE
"""Those of which a test of all architectures is quick."""
WIDE = "wide"  # fills panels, pieces of K and groups of 256, and ends inside each of them
_WIDE: dict[str, Any] = {
    "vocab_size": 3001,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}


def make_config(name: str) -> PreTrainedConfig:
    class_name, own = ("LlamaConfig", _WIDE) if name == WIDE else ARCHITECTURES[name]
    settings = {**COMMON, **own}
    if class_name == "GPT2Config":
        settings = {
            key: settings[key] for key in (*own, "vocab_size", "tie_word_embeddings", "bos_token_id", "eos_token_id")
        }
    config: PreTrainedConfig = getattr(transformers, class_name)(**settings)
    if name == "gpt_oss":
        config.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0}
    register_language_model(config, TEXT_PART_NAMES)
    return config


def make_checkpoint(name: str, directory: Path, std: float = 0.3) -> Path:
    """Writes a checkpoint of random weights, no two norms alike; returns its path.

    `std` is the standard deviation of weights in models 32 wide; wider ones have less, so that their products vary as
    much. By default weights are so large that attention, experts and windows all matter to the chosen tokens, and that
    rounding errors grow from layer to layer.
    """
    torch.manual_seed(7)
    config = make_config(name)
    model = transformers.AutoModelForCausalLM.from_config(config)
    std *= (32 / config.hidden_size) ** 0.5
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sinks" in key or "bias" in key or key.endswith("_input.query"):
                parameter.normal_(std=std)
        for key, buffer in model.named_buffers():
            if "e_score_correction_bias" in key or "expert_bias" in key:
                buffer.normal_(std=std)
            if key.endswith("rotary_emb.alpha"):
                buffer.normal_(std=std)
            if key.endswith("tid2eid"):
                buffer.copy_(torch.rand(len(buffer), model.config.n_routed_experts).topk(buffer.shape[1]).indices)
            if "layer_scalar" in key:
                buffer.uniform_(0.6, 1.4)
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1 and ("norm" in key or "scale" in key) and "bias" not in key:
                parameter.add_(0.1 * torch.randn_like(parameter) + (1.0 if key.endswith("temp") else 0.0))
    path = directory / name
    model.save_pretrained(path, save_original_format=hasattr(transformers, type(model).__name__))
    return path


class ReferenceModel:
    """Hugging Face's own results in float32."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Has it go on behind EOS tokens, as requests of tests do."""
        self.model = model
        if model.generation_config is not None:
            model.generation_config.eos_token_id = None

    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": max_tokens, "do_sample": False, "pad_token_id": 0}
        generated = self.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        return generated[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def smallest_margin(self, prompt: list[int], tokens: list[int]) -> float:
        """Returns the smallest lead of a likeliest token over the second one, in standard deviations of logits.

        Positions are those where `tokens` follow the prompt.
        """
        logits = self.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        first, second = logits.topk(2).values.unbind(1)
        return float((first - second).min() / logits.std())

    @torch.inference_mode()
    def last_hidden_state(self, prompt: list[int]) -> torch.Tensor:
        """Returns the hidden states that the head reads, [len(prompt), hidden_size]."""
        states = self.model.base_model(torch.tensor([prompt])).last_hidden_state
        return states[0]


def load_reference(path: Path) -> ReferenceModel:
    settings = {"dtype": torch.float32, "attn_implementation": "eager"}
    return ReferenceModel(transformers.AutoModelForCausalLM.from_pretrained(path, **settings).eval())


def load_tiny(
    path: Path,
    dtype: str = "float32",
    quantization: str = "none",
    drafts: str = "none",
    kv: str = "auto",
    adapters: Mapping[str, Path] = MappingProxyType({}),
) -> LoadedModel:
    """Loads the model for these adapters, by name, which are not loaded."""
    settings = {"dtype": dtype, "quantization": quantization, "draft_quantization": drafts, "kv_cache_dtype": kv}
    sources = tuple(AdapterSource(name, str(adapter)) for name, adapter in adapters.items())
    return load_model(EngineConfig(model=str(path), device="cpu", adapters=sources, **settings))


class RecordingRunner:
    """A runner that remembers its batches, to show that a test exercised what it claims."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.batches: list[Batch] = []

    def prefill(self, batch: Batch) -> StepOutput:
        self.batches.append(batch)
        return self._runner.prefill(batch)

    def decode(self, batch: Batch) -> StepOutput:
        self.batches.append(batch)
        return self._runner.decode(batch)

    def draft(self, batch: Batch) -> Batch:
        return self._runner.draft(batch)


def tiny_engine(
    model: LoadedModel,
    num_blocks: int = 256,
    block_size: int = 16,
    backend: AttentionBackend | None = None,
    grammars: Grammars | None = None,
    eos_token_ids: tuple[int, ...] = (),
    new_drafter: Callable[[], Drafter] = PromptLookup,
    clock: Callable[[], float] = time.monotonic,
    kv_memory_fd: int | None = None,
    has_adapters: bool = False,
    **settings: Any,
) -> Engine:
    """An engine with a pool of its own over an already loaded model, which lies in the file `kv_memory_fd` if there is
    one. With `has_adapters` it can load some, which other engines over the same model might see. `num_blocks` blocks
    are those of each group of layers."""
    config = EngineConfig(model="tiny", block_size=block_size, **settings)
    groups = window_groups(config, model)
    num_blocks *= groups.num_groups
    shared = None if kv_memory_fd is None else SharedPages(kv_memory_fd, 0)
    of_cache = model.kv_dtype, model.device, model.kept_hidden, shared, groups.of_layers
    cache = KVCache(model.kv_layers, num_blocks, block_size, *of_cache)
    backend = backend or select_backend(model.device, load_kernels())
    has_own_kv = model.draft is not None and bool(model.draft.layers)
    info = fake_info(num_blocks, block_size, max_model_len=model.max_model_len, draft_kv_bytes=int(has_own_kv))
    fields = {name: getattr(info, name) for name in info.__struct_fields__}
    changes = {"vocab_size": model.vocab_size, "eos_token_ids": eos_token_ids or model.eos_token_ids}
    changes |= {"has_head": model.has_head, "kv_groups": groups}
    max_chunk = config.limits_on("cpu").max_num_batched_tokens
    changes["max_model_len"] = groups.max_tokens(num_blocks, block_size, max_chunk, model.max_model_len)
    max_num_seqs = config.limits_on("cpu").max_num_seqs
    states = StateCache(model.states, max_num_seqs, model.device, NUM_STATE_COPIES)
    slots = {"num_state_slots": max_num_seqs, "num_state_checkpoints": NUM_STATE_COPIES} if model.states else {}
    info = type(info)(**{**fields, **changes, **slots})
    forward = choose_forward(model.module, cache, backend, states)
    proposer = proposer_of(model, cache, draft_forward(model, cache, backend))
    runner = RecordingRunner(ModelRunner(model, cache, forward, proposer, states=states))
    grammars = GrammarQueue(_grammar_compiler()) if grammars is None else grammars
    kept: dict[str, Any] = {
        "store": open_store(config, info, cache, states),
        "records": open_records(config, info, cache),
    }
    kept["adapters"] = ModelAdapters(model, forward, 8, config.max_adapter_rank) if has_adapters else None
    return assemble(config, info, runner, clock=clock, grammars=grammars, new_drafter=new_drafter, **kept)


@cache
def _grammar_compiler() -> GrammarCompiler:
    """Returns a compiler that reads token ids as short words over four letters; for grammars, the last one is EOS."""
    words = ["".join(letters) for length in (1, 2, 3, 4) for letters in itertools.product("abcd", repeat=length)]
    return GrammarCompiler(make_tokenizer([word.encode() for word in words[:VOCAB_SIZE]], [VOCAB_SIZE - 1]))
