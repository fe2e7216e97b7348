"""All experts in one call into C++ have, bit for bit, what they have one by one, whatever rows share an expert."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, PreTrainedConfig, Qwen3MoeConfig
from transformers.activations import GELUTanh
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from engine.weights.kernel_experts import take_experts_read
from engine.weights.moe import PackedExperts
from engine.weights.packing_policy import packing_for

pytestmark = pytest.mark.usefixtures("ops", "two_threads")

EXPERTS = 7
ROWS = (1, 2, 3, 5, 8, 13, 33, 64)
FORMATS = [
    (torch.float32, "none"),
    (torch.bfloat16, "none"),
    *((dtype, bits) for bits in ("int8", "int4") for dtype in (torch.float32, torch.bfloat16)),
]
Routes = Callable[[int], Tensor]  # number of rows -> their experts [T, S]

ROUTES: dict[str, Routes] = {
    "any": lambda rows: torch.rand(rows, EXPERTS).topk(3).indices,
    "all rows one expert": lambda rows: torch.full((rows, 1), 4),
    "one expert twice": lambda rows: torch.tensor([[2, 2]]).repeat(rows, 1),
    "few experts": lambda rows: torch.tensor([[5, 1], [1, 6], [5, 6]])[torch.arange(rows) % 3],
    "in turn": lambda rows: (torch.arange(rows)[:, None] + torch.tensor([0, 3])) % EXPERTS,
    "all experts": lambda rows: torch.stack([torch.randperm(EXPERTS) for _ in range(rows)]),
}


def experts_of(kind: str, hidden: int = 72, inner: int = 40) -> nn.Module:
    """Returns experts of random weights: Qwen3's, gpt-oss's with biases and clamps, or some with another activation."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"hidden_size": hidden}
    config: PreTrainedConfig
    if kind == "gpt_oss":
        config = GptOssConfig(**sizes, intermediate_size=inner, num_local_experts=EXPERTS)
        experts: nn.Module = GptOssExperts(config)
    else:
        config = Qwen3MoeConfig(**sizes, moe_intermediate_size=inner, num_experts=EXPERTS)
        experts = Qwen3MoeExperts(config)
    if kind == "gelu_tanh":
        experts.act_fn = GELUTanh()
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=2 / hidden**0.5)
    return experts.requires_grad_(False)


def packed(experts: nn.Module, dtype: torch.dtype, quantization: str) -> PackedExperts:
    return PackedExperts(experts.to(dtype), packing_for(quantization, True).layers)


def check(experts: PackedExperts, routes: Routes, num_rows: int, dtype: torch.dtype, hidden: int = 72) -> None:
    chosen, x = routes(num_rows), (3 * torch.randn(num_rows, hidden)).to(dtype)
    weights = torch.rand(chosen.shape).softmax(dim=-1)
    for each in (weights, weights.to(dtype)):
        expected = experts.run_one_by_one(x, chosen, each)
        assert expected.dtype == dtype and expected.isfinite().all() and expected.abs().max() > 0
        assert torch.equal(experts(x, chosen, each), expected), (num_rows, each.dtype)


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gpt_oss"])
def test_one_call_has_the_bits_of_experts_one_by_one(kind: str, dtype: torch.dtype, quantization: str) -> None:
    experts = packed(experts_of(kind), dtype, quantization)
    assert experts.kernel is not None
    for routes in ROUTES.values():
        for num_rows in ROWS:
            check(experts, routes, num_rows, dtype)


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
def test_many_rows_in_several_batches_have_the_same_bits(dtype: torch.dtype, quantization: str) -> None:
    """Rows exceed a tile, a task and a batch of experts; sizes exceed a panel, a piece of K and a group of it."""
    experts = packed(experts_of("silu", 600, 200), dtype, quantization)
    for routes in ("any", "all rows one expert", "few experts"):
        check(experts, ROUTES[routes], 700, dtype, hidden=600)


def test_coded_experts_beside_others_have_the_same_bits() -> None:
    """Numbers of any magnitude have no code of 12 bits: those experts stay at 16."""
    module = experts_of("silu")
    for name in ("gate_up_proj", "down_proj"):
        module.get_parameter(name)[::2] = torch.randint(-2, 2, module.get_parameter(name)[::2].shape) * 0.1
        module.get_parameter(name)[1::3] *= 2.0 ** torch.randint(-30, 0, module.get_parameter(name)[1::3].shape)
    experts = packed(module, torch.bfloat16, "none")
    for num_rows in ROWS:
        check(experts, ROUTES["any"], num_rows, torch.bfloat16)


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
def test_a_row_is_the_same_alone_in_every_batch_and_on_any_number_of_threads(
    dtype: torch.dtype, quantization: str
) -> None:
    experts = packed(experts_of("silu", 600, 200), dtype, quantization)
    chosen, x = ROUTES["any"](64), torch.randn(64, 600).to(dtype)
    weights = torch.rand(chosen.shape).to(dtype)
    whole = experts(x, chosen, weights)
    for num_threads in (1, 2, 5, 16):
        torch.set_num_threads(num_threads)
        assert torch.equal(experts(x, chosen, weights), whole)
        for rows in (slice(0, 1), slice(7, 9), slice(20, 41), slice(63, 64)):
            assert torch.equal(experts(x[rows], chosen[rows], weights[rows]), whole[rows])


def test_no_rows_have_no_results() -> None:
    experts = packed(experts_of("silu"), torch.bfloat16, "int4")
    chosen = torch.zeros(0, 2, dtype=torch.long)
    assert experts(torch.zeros(0, 72).bfloat16(), chosen, torch.zeros(0, 2)).shape == (0, 72)


def test_what_a_call_returned_stays_when_others_follow() -> None:
    experts = packed(experts_of("silu"), torch.bfloat16, "int8")
    x, chosen = torch.randn(3, 72).bfloat16(), ROUTES["any"](3)
    first = experts(x, chosen, torch.ones(3, 3))
    kept = first.clone()
    experts(2 * x, chosen, torch.ones(3, 3))
    assert torch.equal(first, kept)


@pytest.mark.parametrize("expert", [-1, EXPERTS])
def test_experts_that_there_are_not_are_refused(expert: int) -> None:
    experts = packed(experts_of("silu"), torch.float32, "none")
    with pytest.raises(RuntimeError, match="out of range"):
        experts(torch.zeros(1, 72), torch.tensor([[expert]]), torch.ones(1, 1))


def test_a_gate_that_the_kernels_do_not_have_is_left_to_the_module() -> None:
    class OtherExperts(Qwen3MoeExperts):
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return self.act_fn(gate) * up + 1

    experts = experts_of("silu")
    experts.__class__ = OtherExperts
    assert packed(experts, torch.bfloat16, "int4").kernel is None


@pytest.mark.parametrize("limit", [0.5, 7.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clamped_gates_are_known_with_their_limit(limit: float, dtype: torch.dtype) -> None:
    class ClampedExperts(Qwen3MoeExperts):
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return self.act_fn(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)

    module = experts_of("silu")
    module.__class__, module.limit = ClampedExperts, limit
    experts = packed(module, dtype, "none")
    assert experts.kernel is not None
    check(experts, ROUTES["any"], 9, dtype)


def test_weights_that_torch_multiplies_are_left_to_it() -> None:
    experts = PackedExperts(experts_of("silu"), packing_for("none", False).layers)
    assert experts.kernel is None


def test_the_experts_that_rows_choose_are_counted_each_once() -> None:
    experts = packed(experts_of("silu"), torch.float32, "int8")
    take_experts_read()
    for routes in ROUTES.values():
        chosen = [routes(num_rows) for num_rows in ROWS]  # as many layers
        for each in chosen:
            experts(torch.randn(len(each), 72), each, torch.rand(each.shape))
        assert take_experts_read() == sum(len(each.unique()) for each in chosen) / (EXPERTS * len(ROWS))
    assert take_experts_read() is None
