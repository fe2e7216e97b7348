"""The scan of Mamba-2, made of the projections of such a layer, against its parts."""

import pytest
import torch
from torch.nn import functional
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from engine.mixers.linear_attention import LinearAttention
from engine.mixers.mamba2_scan import Mamba2Scan
from engine.mixers.metadata import StateMetadata
from tests.engine.mixers.random_mixers import CPU, NUM_TOKENS, draw, mamba2_layer, mamba2_scan

pytestmark = pytest.mark.usefixtures("ops")

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_has_the_bits_of_linear_attention_over_its_parts(dtype: torch.dtype) -> None:
    mixer = mamba2_scan(1, dtype)
    states = draw(4, *mixer.state_shape.sizes)
    expected_states, metadata = states.clone(), StateMetadata([2, 0, 3], [20, 1, 12], [False] * 3, CPU)
    decay, time = torch.ops.twostep.mamba2_gates(*mixer[1:4], mixer.least_time, mixer.most_time)
    x, write, read = mixer.rows.float().split([6 * 21, 2 * 19, 2 * 19], dim=1)
    x, write, read = x.unflatten(1, (6, 21)), write.unflatten(1, (2, 19)), read.unflatten(1, (2, 19))
    parts = LinearAttention(read, write, x * time[..., None], decay[..., None], None)
    expected = parts.advance_in_torch(expected_states, metadata) + mixer.skip[:, None] * x
    assert torch.equal(mixer.advance(states, metadata), expected.flatten(1)) and torch.equal(states, expected_states)


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_of_wider_rows_are_read_where_they_lie(dtype: torch.dtype) -> None:
    mixer, metadata = mamba2_scan(1, dtype), StateMetadata([0], [NUM_TOKENS], [True], CPU)
    rows, time_step = torch.cat(mixer[:2], dim=1).split([each.shape[1] for each in mixer[:2]], dim=1)
    states = torch.zeros(2, 1, *mixer.state_shape.sizes)
    both = mixer, mixer._replace(rows=rows, time_step=time_step)
    outputs = [each.advance(own, metadata) for each, own in zip(both, states, strict=True)]
    assert torch.equal(*outputs) and torch.equal(*states)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decays_and_times_are_those_of_transformers(dtype: torch.dtype) -> None:
    mixer = mamba2_scan(1, dtype)._replace(time_step=draw(NUM_TOKENS, 6, dtype=dtype) * 3)
    decay, time = torch.ops.twostep.mamba2_gates(*mixer[1:4], mixer.least_time, mixer.most_time)
    in_time = functional.softplus(mixer.time_step + mixer.time_bias.to(dtype))
    expected = torch.clamp(in_time, mixer.least_time, mixer.most_time).float()
    torch.testing.assert_close(time, expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-6, atol=0)
    torch.testing.assert_close(decay, (mixer.decay_rates * time).exp())
    assert len(expected.unique()) > 20 and expected.min() < in_time.max() and (in_time > expected.max()).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_groups", [1, 3])
def test_a_gated_norm_is_that_of_transformers(dtype: torch.dtype, num_groups: int) -> None:
    x, gates = draw(5, 63), draw(5, 100, seed=1, dtype=dtype)[:, 30:93]
    theirs = MambaRMSNormGated(63, 63 // num_groups, 1e-5).to(dtype).requires_grad_(False)
    theirs.weight.copy_(draw(63))
    expected = theirs(x, gates).to(dtype)
    ours = torch.ops.twostep.gated_group_norm(x.clone(), gates, theirs.weight, 1e-5, num_groups)
    torch.testing.assert_close(ours, expected, rtol=1e-2 if dtype is torch.bfloat16 else 2e-6, atol=1e-6)
    parts = (x * functional.silu(gates.float())).split(63 // num_groups, dim=1), theirs.weight.float().chunk(num_groups)
    rows = [torch.ops.twostep.rms_norm(*part, 1e-5) for part in zip(*parts, strict=True)]
    torch.testing.assert_close(ours, torch.cat(rows, dim=1).to(dtype))


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_between_its_projections_has_the_bits_of_its_parts(dtype: torch.dtype, has_norm: bool) -> None:
    mixer, metadata = mamba2_layer(1, dtype, has_norm), StateMetadata([2, 0, 3], [20, 1, 12], [False] * 3, CPU)
    states = tuple(draw(4, *shape.sizes).to(shape.dtype) for shape in mixer.state_shapes)
    expected_states = tuple(each.clone() for each in states)
    expected = mixer.advance_in_parts(expected_states, metadata)
    assert torch.equal(mixer.advance(states, metadata), expected)
    assert all(map(torch.equal, states, expected_states))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_computes_the_same_in_chunks(dtype: torch.dtype) -> None:
    mixer = mamba2_layer(1, dtype)
    whole, chunked = (
        tuple(torch.zeros(1, *shape.sizes, dtype=shape.dtype) for shape in mixer.state_shapes) for _ in "12"
    )
    expected = mixer.advance(whole, StateMetadata([0], [NUM_TOKENS], [True], CPU))
    parts = [
        mixer.take(rows).advance(chunked, StateMetadata([0], [len(rows)], [False], CPU))
        for rows in torch.arange(NUM_TOKENS).split([1, 17, NUM_TOKENS - 18])
    ]
    assert torch.equal(torch.cat(parts), expected) and all(map(torch.equal, whole, chunked))


def test_a_layer_whose_rows_are_not_its_parts_is_refused() -> None:
    mixer, metadata = mamba2_layer(1), StateMetadata([0], [NUM_TOKENS], [True], CPU)
    states = tuple(torch.zeros(1, *shape.sizes) for shape in mixer.state_shapes)
    for wrong in (mixer._replace(rows=mixer.rows[:, 1:]), mixer._replace(num_groups=40)):
        with pytest.raises(RuntimeError, match="gates, inputs and time steps side by side"):
            wrong.advance(states, metadata)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_read_is_gated_as_by_transformers(dtype: torch.dtype) -> None:
    torch.ops.twostep.replace_activations()
    x, gates = draw(5, 63), draw(5, 100, seed=1, dtype=dtype)[:, 30:93]
    assert torch.equal(torch.ops.twostep.gated_reads(x, gates), (x * functional.silu(gates)).to(dtype))
    for wrong in (gates[:, 1:], gates[1:]):
        with pytest.raises(RuntimeError, match="rows of one size"):
            torch.ops.twostep.gated_reads(x, wrong)


def test_what_would_be_read_out_of_bounds_is_refused() -> None:
    mixer, metadata = mamba2_scan(1), StateMetadata([0], [NUM_TOKENS], [True], CPU)
    states = torch.zeros(1, *mixer.state_shape.sizes)
    for wrong in wrong_ones(mixer):
        with pytest.raises(RuntimeError, match=r"side by side|a time step|a rate and a bias|a factor"):
            wrong.advance(states, metadata)
    for gates, weight, groups in ((63, 62, 1), (62, 63, 1), (63, 63, 2)):
        with pytest.raises(RuntimeError, match=r"rows of one size|a weight has"):
            torch.ops.twostep.gated_group_norm(draw(5, 63), draw(5, gates), draw(weight), 1e-5, groups)


def wrong_ones(mixer: Mamba2Scan) -> list[Mamba2Scan]:
    return [
        mixer._replace(rows=mixer.rows[:, 1:]),
        mixer._replace(time_step=mixer.time_step[1:]),
        mixer._replace(time_step=mixer.time_step[:, 1:]),
        mixer._replace(decay_rates=mixer.decay_rates[1:]),
        mixer._replace(time_bias=mixer.time_bias[1:]),
        mixer._replace(skip=mixer.skip[1:]),
        mixer._replace(num_groups=4),
    ]
