"""Models with compressed attention: what their cache holds, that the proof sees what is wrong, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.attention import registry
from engine.attention.compressed import CompressedAttention, _Step
from engine.attention.kv_cache import CompressedShape, LayerShape, VectorShape, bytes_per_block
from engine.core.errors import AdapterError, UnsupportedModelError
from engine.core.kv_groups import ONE_GROUP
from engine.core.machine import AttentionSize
from engine.kernels import load_kernels
from engine.model.compressed import hyper_connections
from engine.model.compressed.attention import CompressedLayerAttention, EntryIndexer
from engine.model.compressed.hyper_connections import HyperConnection
from engine.model.compressed.pooling import Pooling
from engine.model.compressed.replacement import check_compressed, replace_compressed_layers
from engine.model.paging_proof import prove_paging
from engine.model.planning.estimate import estimate
from engine.runner.loaded_model import LoadedModel
from engine.weights.linear import prepare_linears
from tests.engine.tiny_adapters import make_adapter
from tests.engine.tiny_architectures import tiny_config, tiny_model
from tests.engine.tiny_models import load_reference, load_tiny, make_checkpoint, tiny_engine

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # of transformers' code

KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
DIFFERS = "computes something else over a paged KV cache"


def one_of_each_kind() -> PreTrainedModel:
    changes = {"layer_types": [*KINDS, KINDS[1]], "mlp_layer_types": ["hash_moe", *["moe"] * 3]}
    model = tiny_model("deepseek_v4", changes)
    replace_compressed_layers(model)
    return model


@pytest.fixture
def proved() -> Callable[[], None]:
    """Returns what proves a model, as it is loaded."""
    registry.register()
    model = one_of_each_kind()
    return lambda: prove_paging(model, 512)


def test_all_layers_are_replaced() -> None:
    model = one_of_each_kind()
    kinds = {type(each) for each in model.modules()}
    assert {CompressedLayerAttention, HyperConnection, Pooling, EntryIndexer} - kinds == {Pooling}
    assert not any(name in each.__name__ for each in kinds for name in ("Compressor", "Hyper") if "V4" in each.__name__)


def test_no_product_is_left_to_torch() -> None:
    assert prepare_linears(one_of_each_kind(), load_kernels() is not None).unconverted == ()


def test_the_proof_passes_what_is_right(proved: Callable[[], None]) -> None:
    proved()


def test_the_proof_refuses_entries_that_are_not_kept(
    proved: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompressedAttention, "_write_entries", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match=DIFFERS):
        proved()


def wrong_raw(step: _Step, num_pooled: int) -> torch.Tensor:
    return raw_of_entries(step, num_pooled).roll(1, 1)


def wrong_places(step: _Step, window: int, entries: torch.Tensor, num_entries: torch.Tensor) -> Any:
    return attended(step, window, entries, (num_entries - 1).clamp(min=0))


def wrong_window(step: _Step, window: int, *args: Any) -> Any:
    return attended(step, window - 1, *args)


raw_of_entries, attended = _Step.raw_of_entries, _Step.attended


@pytest.mark.parametrize(
    ("name", "wrong"), [("raw_of_entries", wrong_raw), ("attended", wrong_places), ("attended", wrong_window)]
)
def test_the_proof_refuses_wrong_tokens_and_entries(
    name: str, wrong: Any, proved: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Step, name, wrong)
    with pytest.raises(UnsupportedModelError, match=DIFFERS):
        proved()


def test_the_proof_refuses_entries_without_a_bias(proved: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    make = Pooling.__init__

    def make_without(self: Any, compressor: Any) -> None:
        make(self, compressor)
        self.position_bias = torch.nn.Parameter(torch.zeros_like(self.position_bias), requires_grad=False)

    monkeypatch.setattr(Pooling, "__init__", make_without)
    with pytest.raises(UnsupportedModelError, match=DIFFERS):
        proved()


def test_the_proof_refuses_a_choice_without_weights(
    proved: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = EntryIndexer.call

    def unweighed(*args: Any) -> Any:
        index = call(*args)
        return index._replace(weights=torch.ones_like(index.weights))

    monkeypatch.setattr(EntryIndexer, "call", unweighed)
    with pytest.raises(UnsupportedModelError, match=DIFFERS):
        proved()


@pytest.mark.parametrize("part", ["_balanced", "_weighed"])
def test_the_proof_refuses_streams_that_are_mixed_otherwise(
    part: str, proved: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if part == "_balanced":
        monkeypatch.setattr(HyperConnection, part, lambda _, matrix: matrix.softmax(-1))
    else:
        mixed = hyper_connections._mixed
        monkeypatch.setattr(hyper_connections, "_mixed", lambda *args: mixed(*args[:3], args[3].transpose(-1, -2)))
    with pytest.raises(UnsupportedModelError, match=DIFFERS):
        proved()


def test_pieces_of_a_step_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = one_of_each_kind()
    streams = torch.randn(1, 37, 4, 64)
    with torch.inference_mode():
        expected = model.model.layers[0].attn_hc(streams), model.model.hc_head(streams)
        monkeypatch.setattr(hyper_connections, "_TOKENS_AT_ONCE", 64)
        whole = model.model.layers[0].attn_hc(streams), model.model.hc_head(streams)
    for one, other in zip((*expected[0], expected[1]), (*whole[0], whole[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # torch multiplies until weights are packed


def test_the_cache_has_raw_vectors_and_entries(tiny_model: Callable[..., LoadedModel]) -> None:
    model = tiny_model("deepseek_v4")
    raw = [VectorShape(size, torch.float32) for size in (2 * 2 * (16 + 20), 2 * 16)]
    compressed = [CompressedShape(4, raw[0], VectorShape(20, torch.float32)), CompressedShape(6, raw[1]), None]
    assert [layer.compressed for layer in model.layers] == compressed
    assert [layer.window for layer in model.layers] == [None, None, 7]
    engine = tiny_engine(model, num_blocks=8, block_size=8)
    cache = engine._runner._runner._cache
    numbers = 8 * (3 * 16 + 144 + 32) + 2 * (16 + 20) + 2 * 16
    assert cache.num_bytes == 8 * bytes_per_block(model.layers, 8, torch.float32) == 8 * 4 * numbers
    assert sum(part.nbytes for part in cache.block_bytes(0)) == cache.num_bytes // 8


@pytest.mark.slow
def test_a_token_of_deepseek_v4_flash_takes_what_the_documentation_tells(tmp_path: Path) -> None:
    from transformers import DeepseekV4Config

    DeepseekV4Config(architectures=["DeepseekV4ForCausalLM"]).save_pretrained(tmp_path)
    told = estimate(str(tmp_path))
    assert told.kv_block_bytes == 16 * 201_408 and told.kv_groups == ONE_GROUP
    of_window = AttentionSize(128, 43 * 512 * 2, 43 * 64 * 2 * 2 * 512)
    assert of_window in told.size.attention
    page = (Path(__file__).parents[4] / "docs" / "models.md").read_text(encoding="utf-8")
    assert "201,408 bytes" in page


def test_few_layers_with_a_window_share_blocks_with_the_others() -> None:
    from engine.runner.window_groups import groups_of_layers

    plain = LayerShape(1, 16, 16, window=8, is_latent=True)
    entries = LayerShape(1, 16, 16, is_latent=True, compressed=CompressedShape(4, VectorShape(32, torch.float32)))
    assert groups_of_layers([plain, entries] * 2, 512) == ONE_GROUP
    assert groups_of_layers([plain, LayerShape(1, 16, 16, is_latent=True)] * 2, 512) != ONE_GROUP


def test_it_is_refused_where_it_cannot_be_computed(tiny_model: Callable[..., LoadedModel]) -> None:
    class Call:
        compressed = object()

    calls: list[Any] = [Call()]
    check_compressed("it", calls, torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match="on the CPU only: use --device cpu"):
        check_compressed("it", calls, torch.device("cuda"))


def test_an_adapter_of_a_layer_in_groups_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint("deepseek_v4", tmp_path)
    adapter = make_adapter(tmp_path / "a", load_reference(path), target_modules=["q_a_proj", "o_a_proj"])
    engine = tiny_engine(load_tiny(path), has_adapters=True)
    with pytest.raises(AdapterError, match="o_a_proj"):
        engine.load_adapter(str(adapter))


def test_layers_of_other_code_stay_as_they_are() -> None:
    model = tiny_model("deepseek_v3")
    before = {*model.modules()}
    replace_compressed_layers(model)
    assert {*model.modules()} == before and tiny_config("deepseek_v3").model_type == "deepseek_v3"
