"""Models with sparse attention: what their cache holds, that the proof sees wrong choices, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.attention import approximate, registry, sparse, sparse_blocks, sparse_pools
from engine.attention.kv_cache import LayerShape, VectorShape, bytes_per_block
from engine.attention.metadata import AttentionParams, IndexCall
from engine.attention.registry import AttentionCall
from engine.core.errors import UnsupportedModelError
from engine.mixers.functions import route_recurrent_functions
from engine.model import sparse_attention
from engine.model.known.text_models import register_language_model
from engine.model.latent_attention import has_latents, keep_latents
from engine.model.paging_proof import prove_paging
from engine.model.planning.estimate import estimate
from engine.model.sparse_attention import (
    Indexer,
    LastRotatingIndexer,
    ScaledIndexer,
    check_sparse,
    replace_indexers,
)
from engine.model.text_part import TEXT_PART_NAMES
from engine.runner.loaded_model import LoadedModel
from tests.engine.tiny_architectures import tiny_config, tiny_model
from tests.engine.tiny_models import load_tiny, make_checkpoint, tiny_engine

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # of transformers' code

KEY = VectorShape(20, torch.float32)


def some_of_glm() -> PreTrainedModel:
    return tiny_model("glm_moe_dsa", {"indexer_types": ["full", "shared"] * 2})


def some_of_mistral() -> PreTrainedModel:
    """Returns a model some of whose layers rotate; of those that do not, one takes what another has chosen."""
    return language_model("mistral_large4")


def some_of_glm5() -> PreTrainedModel:
    """Returns a model with linear attention in some layers, others of which choose pools, or take those of another."""
    model = language_model("glm5_next")
    route_recurrent_functions(model)
    return model


def language_model(whole_type: str) -> PreTrainedModel:
    config = tiny_config(whole_type).get_text_config()
    register_language_model(config, TEXT_PART_NAMES)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.eval()


def some_of_hy() -> PreTrainedModel:
    return tiny_model("hy_v4")


def some_of_minimax() -> PreTrainedModel:
    return tiny_model("minimax_m3_vl_text")


def some_of_qwen4() -> PreTrainedModel:
    model = tiny_model("qwen4_exp_text")
    route_recurrent_functions(model)
    return model


@pytest.fixture(params=[some_of_glm, some_of_mistral, some_of_hy, some_of_minimax, some_of_glm5, some_of_qwen4])
def proved(request: pytest.FixtureRequest) -> Callable[[], None]:
    """Returns what proves a model, as it is loaded."""
    registry.register()
    model = request.param()
    replace_indexers(model)
    keep_latents(model, torch.float32)
    return lambda: prove_paging(model, 512)


def test_the_cache_has_the_index_keys_of_layers_that_choose(tiny_model: Callable[..., LoadedModel]) -> None:
    model = tiny_model("glm_moe_dsa")
    assert [layer.index for layer in model.layers] == [KEY, None, KEY]
    cache = tiny_engine(model, num_blocks=8, block_size=4)._runner._runner._cache
    assert [keys is not None and tuple(keys.shape) for keys in cache.index_keys] == [(8, 4, 20), False, (8, 4, 20)]
    assert cache.num_bytes == 8 * bytes_per_block(model.layers, 4, torch.float32) == 8 * 4 * 4 * (3 * 24 + 2 * 20)
    assert sum(part.nbytes for part in cache.block_bytes(0)) == cache.num_bytes // 8


def test_index_keys_keep_the_type_of_the_model() -> None:
    shape = LayerShape(1, 576, 512, is_latent=True, index=VectorShape(128, torch.bfloat16))
    assert bytes_per_block([shape], 16, torch.bfloat16) == 16 * (576 + 128) * 2
    assert bytes_per_block([shape], 16, torch.int8) == 16 * (576 + 18 * 2 + 128 * 2)


def test_a_plan_counts_index_keys(tmp_path: Path) -> None:
    tiny_config("deepseek_v32").save_pretrained(tmp_path)
    told = estimate(str(tmp_path))
    assert told.kv_block_bytes == 16 * 4 * (16 + 8 + 128) * 2
    assert {each.window: each.bytes_per_token for each in told.size.attention} == {8: 4 * 24 * 2, None: 4 * 128 * 2}


def test_the_proof_passes_what_is_right(proved: Callable[[], None]) -> None:
    proved()


def test_pools_are_chosen_over_keys_of_heads_too() -> None:
    registry.register()
    model = some_of_glm5()
    replace_indexers(model)
    assert not has_latents(model)
    prove_paging(model, 512)


def one_too_few(index: IndexCall, *args: Any) -> torch.Tensor:
    slots = chosen(index._replace(num_chosen=index.num_chosen - 1), *args)
    return torch.nn.functional.pad(slots, (0, 1))


def without_weights(index: IndexCall, *args: Any) -> torch.Tensor:
    return chosen(index._replace(weights=torch.ones_like(index.weights)), *args)


chosen = approximate.choose_slots


@pytest.mark.parametrize("proved", [some_of_glm, some_of_mistral, some_of_hy, some_of_glm5], indirect=True)
@pytest.mark.parametrize("wrong", [one_too_few, without_weights])
def test_the_proof_refuses_a_wrong_choice(
    wrong: Callable[..., torch.Tensor], proved: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(approximate, "choose_slots", wrong)
    with pytest.raises(UnsupportedModelError, match="computes something else over a paged KV cache"):
        proved()


@pytest.mark.parametrize("proved", [some_of_minimax], indirect=True)
@pytest.mark.parametrize("change", [{"num_blocks": 1}, {"num_near": 0}])
def test_the_proof_refuses_a_wrong_choice_of_blocks(
    change: dict[str, int], proved: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = sparse_blocks.attending_to_blocks
    monkeypatch.setattr(
        sparse_blocks, "attending_to_blocks", lambda index, *args: choose(index._replace(**change), *args)
    )
    with pytest.raises(UnsupportedModelError, match="computes something else over a paged KV cache"):
        proved()


@pytest.mark.parametrize("proved", [some_of_glm5], indirect=True)
@pytest.mark.parametrize(
    "wrong", [None, lambda index: index._replace(pool_keys=lambda kept, _: kept[:, 0].chunk(2, dim=-1)[0])]
)
def test_the_proof_refuses_wrong_keys_of_pools(
    wrong: Callable[[Any], Any] | None, proved: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = sparse_pools.write_pool_keys
    monkeypatch.setattr(
        sparse_pools, "write_pool_keys", lambda index, *args: None if wrong is None else write(wrong(index), *args)
    )
    with pytest.raises(UnsupportedModelError, match="computes something else over a paged KV cache"):
        proved()


def test_the_proof_refuses_index_keys_that_are_not_kept(
    proved: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_nowhere(keys: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        cache.view(-1, cache.shape[2])[slots].copy_(keys)

    monkeypatch.setattr(sparse, "write_index_keys", write_nowhere)
    with pytest.raises(UnsupportedModelError, match="computes something else over a paged KV cache"):
        proved()


@pytest.mark.parametrize("proved", [some_of_glm, some_of_mistral, some_of_hy, some_of_minimax], indirect=True)
def test_the_proof_refuses_index_keys_that_are_not_rotated(
    proved: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_attention, "global_of", lambda *_: lambda query, key, *_, **__: (query, key))
    with pytest.raises(UnsupportedModelError, match="computes something else over a paged KV cache"):
        proved()


@pytest.mark.parametrize("proved", [some_of_mistral], indirect=True)
@pytest.mark.parametrize("part", ["softmax_scaling", "q_input_norm"])
def test_the_proof_refuses_queries_of_the_indexer_that_lack_a_part(
    part: str, proved: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = ScaledIndexer.__init__

    def make_without(self: Any, *args: Any) -> None:
        make(self, *args)
        setattr(self, part, Unchanged())

    monkeypatch.setattr(ScaledIndexer, "__init__", make_without)
    with pytest.raises(UnsupportedModelError, match="computes something else over a paged KV cache"):
        proved()


class Unchanged(torch.nn.Module):
    def forward(self, query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return query


@pytest.mark.parametrize("proved", [some_of_mistral], indirect=True)
def test_the_proof_refuses_rotations_where_there_are_none(
    proved: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = ScaledIndexer.__init__

    def make_rotating(self: Any, indexer: Any, rotate: Any) -> None:
        make(self, indexer, rotate)
        self._num_rotated = indexer.qk_rope_head_dim

    monkeypatch.setattr(ScaledIndexer, "__init__", make_rotating)
    with pytest.raises(UnsupportedModelError, match="computes something else over a paged KV cache"):
        proved()


@pytest.mark.parametrize("proved", [some_of_hy], indirect=True)
def test_the_proof_refuses_rotations_of_other_numbers(
    proved: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LastRotatingIndexer, "_rotated", Indexer._rotated)
    with pytest.raises(UnsupportedModelError, match="computes something else over a paged KV cache"):
        proved()


def test_what_chooses_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sparse_attention._KNOWN, "hy_v4.HYV4Indexer")
    with pytest.raises(UnsupportedModelError, match=r"HYV4ForCausalLM chooses the positions .* not known here"):
        replace_indexers(tiny_model("hy_v4"))


def test_a_model_whose_tokens_may_see_nothing_is_refused() -> None:
    model = some_of_glm5()
    for layer in model.modules():
        if hasattr(layer, "index_kpool_always_select_tail"):
            layer.index_kpool_always_select_tail = False
    with pytest.raises(UnsupportedModelError, match="attend to whole pools of positions only"):
        replace_indexers(model)


def test_it_is_refused_where_it_cannot_be_computed() -> None:
    calls = [call_with_index(is_latent=True)]
    check_sparse("it", calls, torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match="on the CPU only"):
        check_sparse("it", calls, torch.device("cuda"))
    with pytest.raises(UnsupportedModelError, match="needs latents in the KV cache"):
        check_sparse("it", [call_with_index(is_latent=False)], torch.device("cpu"))


def test_heads_that_choose_blocks_must_fit_those_of_keys(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "index_n_heads": 3}
    tiny_model("minimax_m3_vl_text", heads).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="3 heads that choose blocks and 2 heads of keys"):
        load_tiny(tmp_path)


def call_with_index(is_latent: bool) -> AttentionCall:
    numbers = torch.zeros(1, 1, 1)
    index = IndexCall(numbers, numbers[0], numbers[0], layer=0, num_chosen=1)
    return AttentionCall(*[numbers] * 3, 0, AttentionParams(1.0), False, True, is_latent, index)


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_latents_in_few_bits_keep_the_model_s_type_for_index_keys(kv: str, tmp_path: Path) -> None:
    tiny_model(
        "hy_v4", {"kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_head_dim": 48, "head_dim": 32}
    ).save_pretrained(tmp_path)
    model = load_tiny(tmp_path, "bfloat16", kv=kv)
    assert all(layer.is_latent for layer in model.layers)
    assert [layer.index for layer in model.layers] == [VectorShape(128, torch.bfloat16)] * 2 + [None] * 2


def test_a_cache_that_cannot_hold_latents_is_refused(tmp_path: Path) -> None:
    """Latents of 16 numbers cannot be rounded apart from what follows them."""
    path = make_checkpoint("deepseek_v32", tmp_path)
    with pytest.raises(UnsupportedModelError, match="leave out --kv-cache-dtype"):
        load_tiny(path, kv="int8")
