"""Models with gated streams and n-grams: their layers are replaced, and the proof sees what is wrong or left out."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.attention import approximate, registry, sparse_pools
from engine.core.config import EngineConfig
from engine.core.errors import ConfigError, UnsupportedModelError
from engine.kernels import load_kernels
from engine.mixers.convolution import Convolution
from engine.mixers.functions import route_recurrent_functions
from engine.mixers.linear_attention import LinearAttention
from engine.mixers.metadata import StateMetadata
from engine.mixers.registry import state_handler
from engine.mixers.token_window import TokenWindow
from engine.model.gated_streams import ngram_layer
from engine.model.gated_streams.attention import GatedSparseAttention
from engine.model.gated_streams.gated_residual import GatedResidual
from engine.model.gated_streams.grouped_norm import GroupedNorm
from engine.model.gated_streams.ngram_embedding import NGramEmbedding
from engine.model.gated_streams.ngram_layer import NGramLayer
from engine.model.gated_streams.replacement import replace_gated_streams
from engine.model.loader import load_model
from engine.model.paging_proof import prove_paging
from engine.model.planning.estimate import estimate
from engine.model.small_copy import num_distinct_layers
from engine.model.sparse_attention import MeanPoolIndexer, replace_indexers
from engine.weights.linear import prepare_linears
from tests.engine.fakes import add, run_to_end
from tests.engine.model.eagle_checkpoints import head_tensors, load_with_eagle, write_head
from tests.engine.model.mtp_checkpoints import has_head_beside
from tests.engine.tiny_architectures import tiny_config, tiny_model
from tests.engine.tiny_models import load_tiny, make_checkpoint, make_config, tiny_engine

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # of transformers' code

DIFFERS = "computes something else over a paged KV cache"
CPU = torch.device("cpu")


def replaced() -> PreTrainedModel:
    model = tiny_model("qwen4_exp_text")
    replace_indexers(model)
    replace_gated_streams(model)
    return model


def proved() -> None:
    """Proves a model, as it is loaded."""
    registry.register()
    model = tiny_model("qwen4_exp_text")
    route_recurrent_functions(model)
    prove_paging(model, 512)


def test_all_layers_are_replaced() -> None:
    kinds = {GatedSparseAttention, GatedResidual, GroupedNorm, NGramEmbedding, NGramLayer, MeanPoolIndexer}
    assert kinds <= {type(each) for each in replaced().modules()}


def test_no_product_is_left_to_torch() -> None:
    assert prepare_linears(replaced(), load_kernels() is not None).unconverted == ()


def test_the_proof_passes_what_is_right() -> None:
    proved()


advance_window, advance_rows, advance_heads = TokenWindow.advance, Convolution.advance, LinearAttention.advance
norm, weigh, own_text = GroupedNorm.forward, GatedResidual.forward, NGramEmbedding._of_own_text
choose = approximate.choose_slots


def forgetting(advance: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, states, metadata: advance(self, torch.zeros_like(states), metadata)


def half_shares(self: GatedResidual, streams: Tensor) -> Any:
    result = weigh(self, streams)
    return (*result[:2], result[2] / 2) if isinstance(result, tuple) else result


def from_the_last_stream(self: GatedResidual, streams: Tensor) -> Tensor:
    return streams.unflatten(-1, (self._num_streams, -1))[..., -1, :]


WRONG: dict[str, tuple[Any, str, Any]] = {
    "states of token ids": (TokenWindow, "advance", forgetting(advance_window)),
    "states of convolutions": (Convolution, "advance", forgetting(advance_rows)),
    "states of gated delta nets": (LinearAttention, "advance", forgetting(advance_heads)),
    "ends of texts": (NGramEmbedding, "_of_own_text", lambda self, tokens: tokens.clamp(min=0)),
    "what is before a text": (NGramEmbedding, "_of_own_text", lambda self, tokens: own_text(self, tokens.abs())),
    "hashes": (NGramEmbedding, "_hashed", lambda self, tokens: tokens[:, :1] % self.sizes + self.offsets),
    "gates of n-grams": (NGramLayer, "_gates", lambda self, products: products.sum(-1, keepdim=True).sigmoid()),
    "taps": (ngram_layer, "_spread_taps", lambda convolution: convolution.weight[:, 0].float().t().contiguous()),
    "norms of streams": (GroupedNorm, "forward", lambda self, streams: streams * self.factors),
    "weights of norms": (GroupedNorm, "forward", lambda self, streams: norm(self, streams) / self.factors),
    "shares": (GatedResidual, "forward", half_shares),
    "means of streams": (GatedResidual, "_mean", from_the_last_stream),
    "means of keys": (MeanPoolIndexer, "_pool_keys", lambda self, rotary, kept, positions: kept[:, 0]),
    "rotations of keys": (MeanPoolIndexer, "_rotated", lambda self, heads, rotation: heads),
    "keys of pools": (sparse_pools, "write_pool_keys", lambda *_: None),
    "own positions": (sparse_pools, "_with_own", lambda pools, positions, index: pools),
    "choice of pools": (approximate, "choose_slots", lambda *args: torch.zeros_like(choose(*args))),
    "gates of attention": (GatedSparseAttention, "_gated", lambda self, output, gates: output),
}


@pytest.mark.parametrize("part", WRONG)
def test_the_proof_sees_a_part_that_is_wrong(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong = WRONG[part]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(UnsupportedModelError, match=DIFFERS):
        proved()


class FreshStates:
    """A handler for one sequence, whose states begin with nothing."""

    def advance(self, mixer: Any) -> Tensor:
        shape = mixer.state_shape
        num_tokens = len(mixer.token_ids) if isinstance(mixer, TokenWindow) else len(mixer.x)
        metadata = StateMetadata([0], [num_tokens], [True], CPU)
        return mixer.advance(torch.zeros(1, *shape.sizes, dtype=shape.dtype), metadata)


def test_n_grams_end_where_a_text_ends() -> None:
    model = tiny_model("qwen4_exp_text")
    embedding = model.model.layers[0].ple.ple_embedding
    eos, ours = int(embedding.eos_token_id), NGramEmbedding(embedding)
    for token_ids in ([eos, 7, 8, 9, eos, 4, eos, eos, 5, 6, 7], [7], [eos], [3, eos, 9]):
        ids = torch.tensor([token_ids])
        with state_handler(FreshStates()):
            assert torch.equal(ours(ids), embedding(ids, None))


def test_layers_that_differ_by_nothing_but_the_rows_of_their_n_grams_are_of_one_kind() -> None:
    layer_types = ["linear_attention"] * 3 + ["indexed_attention"]
    model = tiny_model("qwen4_exp_text", {"layer_types": layer_types, "ple_layer_ids": [1, 2, 3]})
    sizes = {layer.ple.ple_embedding.total_vocab_size for layer in model.model.layers[:3]}
    assert len(sizes) == 3 and num_distinct_layers(model) == 4
    model = tiny_model("qwen4_exp_text", {"layer_types": layer_types[::-1], "ple_layer_ids": [2, 3, 4]})
    assert num_distinct_layers(model) == 2


def test_a_plan_counts_index_keys(tmp_path: Path) -> None:
    tiny_config("qwen4_exp_text").save_pretrained(tmp_path)
    told = estimate(str(tmp_path))
    assert told.kv_block_bytes == 16 * 2 * (2 * 2 * 16 + 16) * 2  # tokens, layers, keys and values and an index key
    assert told.num_distinct_layers == 2


@pytest.mark.parametrize("gate", ["silu", "sigmoid", None])
def test_gates_of_delta_nets_are_of_either_kind(
    gate: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("qwen4")
    config.output_gate_type = gate
    monkeypatch.setattr("tests.engine.tiny_models.make_config", lambda _: config)
    model = load_tiny(make_checkpoint("qwen4", tmp_path))
    assert model.architecture == "Qwen4ExpForCausalLM"


def test_a_head_that_reads_hidden_states_of_layers_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint("qwen4", tmp_path)
    head = write_head(tmp_path / "head", head_tensors())
    with pytest.raises(ConfigError, match=r"those of this model have several streams \(hc_count\)"):
        load_with_eagle(path, head)


def test_its_own_mtp_head_is_left_out_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint("qwen4", tmp_path)
    with caplog.at_level(logging.WARNING, "engine.model.drafting.mtp_head"):
        assert not has_head_beside(path, "mtp.fc.weight", torch.ones(32, 64))
    assert "several streams, whose form is not known here" in caplog.text


def test_shards_of_n_grams_are_read(tmp_path: Path) -> None:
    """A checkpoint has an embedding in parts, as it is published."""
    path = make_checkpoint("qwen4", tmp_path)
    names = {name for name in load_file(path / "model.safetensors") if "ngram_embedding" in name}
    assert sum("layers.0." in name for name in names) == 4
    own = load_model(EngineConfig(model=str(path), device="cpu", dtype="float32")).module
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tables = [each.model.layers[0].ple.ple_embedding.ngram_embedding.weight for each in (own, theirs)]
    assert torch.equal(*tables)


def test_layers_of_other_code_stay_as_they_are() -> None:
    model = tiny_model("qwen3_next")
    before = {*model.modules()}
    replace_gated_streams(model)
    assert {*model.modules()} == before


def test_a_prefix_that_ends_inside_a_pool_changes_no_bit(tmp_path: Path) -> None:
    """States are copied after each 18 tokens, in the middle of a pool."""
    model, text = load_tiny(make_checkpoint("qwen4", tmp_path), "bfloat16"), [(7 * at + 3) % 190 for at in range(47)]
    settings: dict[str, Any] = {"block_size": 6, "state_checkpoint_interval": 18, "max_num_batched_tokens": 11}
    answers, cached = [], []
    for before in ([], [*text[:30], 1, 2]):
        engine = tiny_engine(model, **settings)
        if before:
            add(engine, "before", before, max_tokens=8, temperature=0.0)
            run_to_end(engine)
        add(engine, "mine", text, max_tokens=12, temperature=1.2, seed=5, logprobs=3)
        updates = run_to_end(engine)["mine"]
        assert updates[0].first is not None
        cached.append(updates[0].first.num_cached_tokens)
        answers.append([(each.token_id, each.logprob) for update in updates for each in update.logprobs])
    assert cached == [0, 18] and answers[0] == answers[1]
