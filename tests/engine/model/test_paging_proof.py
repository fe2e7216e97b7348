"""Models that mix tokens by anything but the registered attention are refused before they are served."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from engine.attention import approximate, reference, registry
from engine.attention.kv_cache import LayerCache
from engine.attention.metadata import AttentionMetadata, AttentionParams
from engine.core.config import EngineConfig
from engine.core.errors import UnsupportedModelError
from engine.mixers.convolution import Convolution
from engine.mixers.draft_step import DraftStep
from engine.mixers.functions import route_recurrent_functions
from engine.mixers.linear_attention import LinearAttention
from engine.mixers.metadata import StateMetadata
from engine.mixers.real_gated_recurrence import RealGatedRecurrence
from engine.mixers.selective_scan import SelectiveScan
from engine.model.loader import load_model
from engine.model.paging_proof import prove_paging
from engine.model.small_copy import randomize
from tests.engine.tiny_architectures import tiny_model

EQUAL: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4},
    "gemma2": {},
    "gemma3_text": {},
    "gpt_oss": {},
    "gpt2": {},
    "deepseek_v3": {},
    "phimoe": {},
}
RECURRENT: dict[str, type[Any]] = {
    "lfm2": Convolution,
    "qwen3_5_text": LinearAttention,
    "kimi_linear": LinearAttention,
    "falcon_h1": LinearAttention,
    "mamba": SelectiveScan,
    "minimax": LinearAttention,
    "recurrent_gemma": RealGatedRecurrence,
}
"""Model type -> a mixer of its layers."""
MIXES_OTHERWISE: dict[str, dict[str, Any]] = {
    "phimoe": {"sliding_window": 8},
    "bart": {},
}


@pytest.fixture(autouse=True)
def _registered() -> None:
    registry.register()


@pytest.mark.parametrize("model_type", EQUAL)
def test_what_attends_through_the_registry_passes(model_type: str) -> None:
    prove_paging(tiny_model(model_type, EQUAL[model_type]), 512)


@pytest.mark.parametrize("model_type", MIXES_OTHERWISE)
def test_what_mixes_tokens_otherwise_is_refused(model_type: str) -> None:
    model = tiny_model(model_type, MIXES_OTHERWISE[model_type])
    with pytest.raises(UnsupportedModelError, match=type(model).__name__):
        prove_paging(model, 512)


def test_a_checkpoint_is_refused_before_it_is_served(tmp_path: Path) -> None:
    tiny_model("phimoe", MIXES_OTHERWISE["phimoe"]).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="computes something else over a paged KV cache"):
        load_model(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32"))


def test_a_short_context_is_not_exceeded() -> None:
    prove_paging(tiny_model("opt", {"max_position_embeddings": 12}), 12)


def test_weights_that_are_all_zero_are_drawn() -> None:
    model = tiny_model("llama")
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    with torch.no_grad():
        randomize(model)
    assert all(float(parameter.detach().std()) > 0 for parameter in model.parameters())


@pytest.mark.parametrize("model_type", RECURRENT)
def test_states_pass_and_are_used(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(model_type)
    route_recurrent_functions(model)
    prove_paging(model, 512)
    mixer = RECURRENT[model_type]
    advance = mixer.advance

    def forgetting(self: Any, states: Tensor, metadata: StateMetadata) -> Tensor:
        return cast(Tensor, advance(self, torch.zeros_like(states), metadata))

    monkeypatch.setattr(mixer, "advance", forgetting)
    with pytest.raises(UnsupportedModelError, match="computes something else"):
        prove_paging(model, 512)


@pytest.mark.parametrize("model_type", RECURRENT)
def test_a_wrong_draft_token_must_leave_no_trace(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(model_type)
    route_recurrent_functions(model)
    settle = DraftStep.settle
    monkeypatch.setattr(DraftStep, "settle", lambda step, num_kept: settle(step, [num + 1 for num in num_kept]))
    with pytest.raises(UnsupportedModelError, match="computes something else"):
        prove_paging(model, 512)


WRONG: Mapping[str, Callable[[AttentionParams], AttentionParams]] = {
    "scaling": lambda params: params._replace(scaling=params.scaling * 1.1),
    "sliding_window": lambda params: params._replace(sliding_window=None),
    "softcap": lambda params: params._replace(softcap=None),
    "sinks": lambda params: params._replace(sinks=None),
}


@pytest.mark.parametrize(
    ("model_type", "lost", "changes"),
    [
        ("llama", "scaling", {}),
        ("gemma3_text", "sliding_window", {}),
        ("gemma2", "softcap", {"attn_logit_softcapping": 1.0}),
        ("gpt_oss", "sinks", {}),
    ],
)
def test_a_parameter_that_is_lost_is_seen(
    model_type: str, lost: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = approximate.paged_attention

    def wrong(query: Tensor, cache: LayerCache, metadata: AttentionMetadata, params: AttentionParams) -> Tensor:
        return attend(query, cache, metadata, WRONG[lost](params))

    monkeypatch.setattr(approximate, "paged_attention", wrong)
    with pytest.raises(UnsupportedModelError, match="computes something else"):
        prove_paging(tiny_model(model_type, changes), 512)


def test_what_is_not_a_number_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = approximate.paged_attention
    monkeypatch.setattr(approximate, "paged_attention", lambda *arguments: attend(*arguments) * torch.nan)
    with pytest.raises(UnsupportedModelError, match="computes something else"):
        prove_paging(tiny_model("llama"), 512)


@pytest.mark.parametrize(
    "params",
    [
        AttentionParams(0.3),
        AttentionParams(0.3, sliding_window=3),
        AttentionParams(0.3, softcap=2.0),
        AttentionParams(0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    ],
)
def test_approximate_attention_is_the_reference_but_for_rounding(params: AttentionParams) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    cache = LayerCache(draw(5, 2, 4, 8), draw(5, 2, 4, 6))
    metadata = AttentionMetadata(
        block_tables=torch.tensor([[3, 1, 0], [4, 2, 0]], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 6, 7], dtype=torch.int32),
        context_lens=torch.tensor([10, 7], dtype=torch.int32),
        slot_mapping=torch.arange(7),
        max_seqlen_q=6,
        max_context_len=10,
    )
    query = draw(7, 4, 8)
    expected = reference.paged_attention(query, cache, metadata, params)
    computed = approximate.paged_attention(query, cache, metadata, params)
    assert computed.shape == expected.shape
    torch.testing.assert_close(cast(Any, computed), expected, rtol=1e-5, atol=1e-6)
