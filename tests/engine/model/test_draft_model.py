"""A draft model from a checkpoint of its own: no answer changes, its KV is right wherever it comes from, and what
cannot draft is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.assembly import load_engine
from engine.core.config import EngineConfig
from engine.core.errors import ConfigError
from engine.engine import Engine
from engine.model.setup import load_model_runner
from engine.runner.loaded_model import DraftModel, LoadedModel
from tests.crossed import crossed
from tests.engine.fakes import add, run_to_end, tokens_of
from tests.engine.model.always_drafting import answers, let_always_draft
from tests.engine.model.small_models import EMBEDDED, save_small_model
from tests.engine.tiny_models import tiny_engine

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [(7 * at) % 190 for at in range(37)]


def with_draft(model: LoadedModel, other: LoadedModel) -> LoadedModel:
    return replace(model, draft=DraftModel(other.module, other.size, other.layers))


def always_drafting(model: LoadedModel, **settings: Any) -> Engine:
    return let_always_draft(tiny_engine(model, num_speculative_tokens=8, **settings), 3)


# An architecture -> that of the model which drafts for it.
DRAFTING = {
    **{"llama": "gpt2", "gemma3": "llama", "deepseek_v3": "qwen3", "gpt_oss": "mixtral"},
    **{"qwen3_5": "llama", "jamba": "qwen3"},
}


@pytest.mark.parametrize(("architecture", "dtype"), crossed(DRAFTING, ("float32", "bfloat16")))
def test_answers_stay_the_same_bit_for_bit(
    architecture: str, dtype: str, tiny_model: Callable[..., LoadedModel]
) -> None:
    target, other = tiny_model(architecture, dtype), tiny_model(DRAFTING[architecture], dtype)
    plain = answers(tiny_engine(target, num_speculative_tokens=0))
    assert answers(always_drafting(with_draft(target, other))) == plain
    assert answers(always_drafting(with_draft(target, other), num_blocks=24, block_size=4)) == plain


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_it_may_be_quantized(quantization: str, tiny_model: Callable[..., LoadedModel]) -> None:
    target, other = tiny_model("llama", "bfloat16"), tiny_model("qwen3", "bfloat16", quantization)
    plain = answers(tiny_engine(target, num_speculative_tokens=0))
    assert answers(always_drafting(with_draft(target, other))) == plain


def num_rejected(runs: Engine) -> int:
    stats = runs._scheduler.stats
    assert stats.num_drafts > 10
    return stats.num_drafts - stats.num_accepted_drafts


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "sampled"])
def test_a_twin_is_always_right(
    architecture: str, params: dict[str, Any], tiny_model: Callable[..., LoadedModel]
) -> None:
    """It samples what the model does if its KV is right: after prompts in chunks, and in steps without drafts."""
    model = tiny_model(architecture, "bfloat16")
    runs = always_drafting(with_draft(model, model), max_num_batched_tokens=16, max_prefill_tokens_per_gap=4)
    add(runs, "a", PROMPT, max_tokens=20, **params)
    for _ in range(5):
        runs.step()
    add(runs, "b", PROMPT[::-1], max_tokens=20, **params)
    run_to_end(runs)
    assert num_rejected(runs) == 0


def test_a_twin_is_right_after_a_prefix_hit_and_after_preemption(tiny_model: Callable[..., LoadedModel]) -> None:
    model = tiny_model("llama", "bfloat16")
    runs = always_drafting(with_draft(model, model), num_blocks=26, block_size=4)
    add(runs, "a", PROMPT, max_tokens=20, temperature=0.0)
    text = [*PROMPT, *tokens_of(run_to_end(runs)["a"])]
    add(runs, "b", [*text, 5, 6], max_tokens=20, temperature=0.0)
    add(runs, "first", PROMPT[5:], max_tokens=20, temperature=0.0, priority=-1)
    updates = run_to_end(runs)
    assert updates["b"][0].first is not None and updates["b"][0].first.num_cached_tokens > len(PROMPT)
    assert num_rejected(runs) == 0


def config_with(draft: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(
        model=str(EMBEDDED), draft_model=str(draft), **{"num_blocks": 64, "max_model_len": 512, **settings}
    )


def test_a_checkpoint_is_loaded_beside_the_model_and_its_memory_told(tmp_path: Path) -> None:
    small = save_small_model(tmp_path)
    _, plain = load_model_runner(EngineConfig(model=str(EMBEDDED), num_blocks=64, max_model_len=512))
    _, info = load_model_runner(config_with(small))
    dtype_bytes = 4 if info.dtype == "float32" else 2
    assert info.draft_kv_bytes == 64 * 16 * 2 * 2 * 32 * dtype_bytes
    assert info.kv_cache_bytes == plain.kv_cache_bytes + info.draft_kv_bytes
    assert info.draft_size is not None and info.draft_size.weight_bytes < 0.2 * info.size.weight_bytes
    assert info.weights_fingerprint == plain.weights_fingerprint  # answers do not depend on it


def test_memory_for_kv_is_shared_by_both(tmp_path: Path) -> None:
    small, num_bytes = save_small_model(tmp_path), 1 << 23
    given = {"num_blocks": None, "kv_cache_bytes": num_bytes}
    _, plain = load_model_runner(EngineConfig(model=str(EMBEDDED), kv_cache_bytes=num_bytes, max_model_len=512))
    _, info = load_model_runner(config_with(small, **given))
    assert info.num_blocks < plain.num_blocks and info.kv_cache_bytes <= num_bytes


def test_the_embedded_model_drafts_for_itself(tmp_path: Path) -> None:
    """A model as its own draft model, in fewer bits and from its checkpoint."""
    runs = let_always_draft(load_engine(config_with(EMBEDDED, draft_quantization="int4")), 3)
    plain = load_engine(EngineConfig(model=str(EMBEDDED), num_speculative_tokens=0, num_blocks=64, max_model_len=512))
    for each in (runs, plain):
        add(each, "a", range(100, 140), max_tokens=60, temperature=0.7, seed=3)
    assert tokens_of(run_to_end(runs)["a"]) == tokens_of(run_to_end(plain)["a"])
    stats = runs._scheduler.stats
    assert stats.num_accepted_drafts > 0.5 * stats.num_drafts > 0


def change(path: Path, edit: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def swap_tokens(tokenizer: Any) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    one, other = list(vocabulary)[300:302]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]


def test_what_cannot_draft_for_a_model_is_refused_in_a_sentence(tmp_path: Path) -> None:
    def refusal(name: str, edit: Callable[[Any], None] | None = None, **settings: Any) -> str:
        small = save_small_model(tmp_path / name, **settings)
        if edit:
            change(small / "tokenizer.json", edit)
        with pytest.raises(ConfigError) as caught:
            load_engine(config_with(small))
        return str(caught.value)

    assert "a vocabulary of 6,100 tokens, not the model's 6,144" in refusal("size", vocab_size=6100)
    assert "contexts of 256 tokens, fewer than 512" in refusal("context", max_position_embeddings=256)
    assert "another vocabulary than the model: they differ in token 3" in refusal("words", swap_tokens)
    other_text = refusal("text", lambda tokenizer: tokenizer["model"].update(merges=tokenizer["model"]["merges"][:50]))
    assert "cuts texts into other tokens" in other_text


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"draft_model": "x", "num_speculative_tokens": 0}, "^--draft-model needs --num-speculative-tokens"),
        ({"draft_quantization": "int8"}, "^--draft-quantization int8 is for a --draft-model"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(model="x", **settings)
    EngineConfig(model="x", draft_model="y", quantization="int4", draft_quantization="int4")
