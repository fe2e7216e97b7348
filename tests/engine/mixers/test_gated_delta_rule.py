"""The gated delta rule, made of the projections of a gated delta net, against its parts."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.mixers.gated_delta_rule import GatedDeltaRule
from engine.mixers.linear_attention import LinearAttention
from engine.mixers.metadata import StateMetadata
from tests.engine.mixers.random_mixers import CPU, NUM_TOKENS, draw, gated_delta_rule

pytestmark = pytest.mark.usefixtures("ops")

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_has_the_bits_of_linear_attention_over_its_parts(dtype: torch.dtype) -> None:
    mixer = gated_delta_rule(1, dtype)
    states = draw(4, *mixer.state_shape.sizes)
    expected_states, metadata = states.clone(), StateMetadata([2, 0, 3], [20, 1, 12], [False] * 3, CPU)
    expected = parts_of(mixer).advance_in_torch(expected_states, metadata).flatten(1).to(dtype)
    assert torch.equal(mixer.advance(states, metadata), expected) and torch.equal(states, expected_states)


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_of_wider_rows_are_read_where_they_lie(dtype: torch.dtype) -> None:
    mixer, metadata = gated_delta_rule(1, dtype), StateMetadata([0], [NUM_TOKENS], [True], CPU)
    sizes = [each.shape[1] for each in mixer[:3]]
    columns = torch.cat(mixer[:3], dim=1).split(sizes, dim=1)
    states = torch.zeros(2, 1, *mixer.state_shape.sizes)
    outputs = [
        each.advance(own, metadata)
        for each, own in zip((mixer, GatedDeltaRule(*columns, *mixer[3:])), states, strict=True)
    ]
    assert torch.equal(*outputs) and torch.equal(*states)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decays_and_rates_are_those_of_transformers(dtype: torch.dtype) -> None:
    mixer = gated_delta_rule(1, dtype)._replace(time_step=draw(NUM_TOKENS, 6, dtype=dtype) * 30)
    decay, rate = gates_of(mixer)
    torch.testing.assert_close(rate, mixer.write.sigmoid().float())
    in_time = functional.softplus(mixer.time_step.float() + mixer.time_bias)
    torch.testing.assert_close(decay, (mixer.decay_rates * in_time).exp())
    assert decay.min() < 1e-6 and decay.max() > 0.999


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["sigmoid", "silu", "none"])
def test_gates_multiply_rows_as_transformers_does(dtype: torch.dtype, activation: str) -> None:
    x, gates = draw(5, 40, dtype=dtype), draw(5, 100, seed=1, dtype=dtype)[:, 30:70]
    wide = {"sigmoid": gates.sigmoid(), "silu": functional.silu(gates.float()), "none": gates}[activation]
    expected = (x * wide).to(dtype)
    torch.ops.twostep.multiply_by_gates(x, gates, activation)
    torch.testing.assert_close(x, expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-6, atol=0)


def test_what_would_be_read_out_of_bounds_is_refused() -> None:
    mixer, metadata = gated_delta_rule(1), StateMetadata([0], [NUM_TOKENS], [True], CPU)
    states = torch.zeros(1, *mixer.state_shape.sizes)
    for wrong in (
        mixer._replace(qkv=mixer.qkv[:, 1:]),
        mixer._replace(write=mixer.write[1:], time_step=mixer.time_step[1:]),
        mixer._replace(write=mixer.write[:, 1:], time_step=mixer.time_step[:, 1:]),
        mixer._replace(decay_rates=mixer.decay_rates[1:]),
        mixer._replace(num_groups=4),
    ):
        with pytest.raises(RuntimeError, match=r"side by side|two numbers|a rate and a bias"):
            wrong.advance(states, metadata)


def parts_of(mixer: GatedDeltaRule) -> LinearAttention:
    sizes = [mixer.num_groups * mixer.key_size] * 2
    query, key, value = mixer.qkv.float().split([*sizes, mixer.qkv.shape[1] - sum(sizes)], dim=1)
    query, key = (unit_heads(each, mixer.key_size) for each in (query, key))
    decay, rate = gates_of(mixer)
    value = value.unflatten(1, (mixer.write.shape[1], -1))
    return LinearAttention(query * mixer.key_size**-0.5, key, value, decay[..., None], rate)


def unit_heads(rows: Tensor, size: int) -> Tensor:
    heads = rows.unflatten(1, (-1, size)).contiguous()
    normed: Tensor = torch.ops.twostep.rms_norm(heads, torch.full((size,), size**-0.5), 1e-6 / size)
    return normed


def gates_of(mixer: GatedDeltaRule) -> tuple[Tensor, Tensor]:
    decay, rate = torch.ops.twostep.delta_gates(*mixer[1:5])
    return decay, rate
