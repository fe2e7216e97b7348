"""The activations that replace torch's are close to them, and do not depend on an element's neighbours."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels import load_kernels

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "gelu": functional.gelu,
    "softplus": functional.softplus,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def replaced() -> None:
    if load_kernels() is None:
        pytest.skip("no kernels here")
    torch.ops.twostep.replace_activations()


def exact(name: str, x: Tensor) -> Tensor:
    """Computes the activation by its definition, in float64."""
    x = x.double()
    if name == "softplus":
        return torch.logaddexp(x, torch.zeros_like(x))
    if name == "gelu":
        return x * 0.5 * (1 + torch.erf(x / 2**0.5))
    u = 1.5957691216057308 * (x + 0.044715 * x**3) if name == "gelu_tanh" else x
    sigmoid = 1 / (1 + torch.exp(-u))
    return sigmoid if name == "sigmoid" else x * sigmoid


def values(dtype: torch.dtype) -> Tensor:
    edges = torch.tensor([0.0, -0.0, 88.0, -88.0, 1e4, -1e4, 1e-30, float("inf")])
    return torch.cat([torch.randn(9_991, generator=torch.Generator().manual_seed(1)) * 4, edges]).to(dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_close_to_their_definition(name: str, dtype: torch.dtype) -> None:
    x = values(dtype)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(ACTIVATIONS[name](x).double(), exact(name, x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("num_columns", [1, 12, 48, 100, 4864])
def test_a_row_is_activated_the_same_among_any_others(name: str, dtype: torch.dtype, num_columns: int) -> None:
    activation = ACTIVATIONS[name]
    rows = (torch.randn(70, num_columns, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    together = activation(rows)
    for start, end in ((0, 1), (3, 5), (1, 34), (6, 70)):
        assert torch.equal(activation(rows[start:end].clone()), together[start:end])


IN_PLACE = {
    "silu": torch.ops.aten.silu_,
    "sigmoid": torch.ops.aten.sigmoid_,
    "gelu": torch.ops.aten.gelu_,
    "gelu_tanh": lambda x: torch.ops.aten.gelu_(x, approximate="tanh"),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_and_strided_give_the_same(name: str) -> None:
    x = values(torch.float32).view(99, 101)
    expected = ACTIVATIONS[name](x)
    assert torch.equal(ACTIVATIONS[name](x[:, ::2]), expected[:, ::2])
    changed = x.clone()
    half = changed[:, ::2]
    IN_PLACE[name](half)
    assert torch.equal(changed[:, ::2], expected[:, ::2]) and torch.equal(changed[:, 1::2], x[:, 1::2])


def test_nan_stays_nan_and_nothing_else_becomes_it() -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.0])
    assert torch.sigmoid(x)[1:].tolist() == [1.0, 0.0, pytest.approx(0.9525741)]
    assert functional.silu(x).isnan().tolist() == [True, False, True, False]


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00001, 0x7FC0007F, 0x7FFFFFFF])
def test_any_nan_stays_nan(bits: int) -> None:
    x = torch.tensor([bits] * 20, dtype=torch.int32).view(torch.float32)
    for sign in (1, -1):
        assert all(ACTIVATIONS[name](sign * x).isnan().all() for name in ACTIVATIONS)


def test_an_unknown_element_type_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="Half"):
        functional.silu(torch.ones(3, dtype=torch.float16))


@pytest.mark.parametrize("beta", [0.5, 1.0])
@pytest.mark.parametrize("threshold", [3.0, 20.0, 30.0])
def test_softplus_has_torchs_settings(beta: float, threshold: float) -> None:
    x = torch.linspace(-60, 60, 999)
    scaled = x.double() * beta
    expected = torch.where(scaled > threshold, x.double(), exact("softplus", scaled) / beta)
    torch.testing.assert_close(functional.softplus(x, beta, threshold).double(), expected, rtol=4e-7, atol=0)
