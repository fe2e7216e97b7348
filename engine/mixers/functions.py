"""Transformers' recurrent functions, by their names and with their arguments, made of the mixers here."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from engine.kernels import load_kernels
from engine.mixers.convolution import Convolution
from engine.mixers.linear_attention import LinearAttention
from engine.mixers.registry import Function, StateHandler, replace_functions
from engine.mixers.selective_scan import SelectiveScan
from engine.mixers.sums import halved_sum

__all__ = ["route_recurrent_functions"]

_EPS = 1e-6


def route_recurrent_functions(model: nn.Module) -> None:
    """Routes all recurrent functions that the model's layers call to the context's handler. Idempotent."""
    replace_functions(model, _FUNCTIONS)


def _causal_conv1d(
    handler: StateHandler,
    hidden_states: Tensor,  # [1, channels, num_tokens]
    weight: Tensor,  # [channels, taps]
    bias: Tensor | None = None,  # [channels]
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    is_gated = activation in ("silu", "swish")
    taps = weight.float().t().contiguous()
    out = handler.advance(Convolution(hidden_states[0].t(), taps, None if bias is None else bias.float(), is_gated))
    if activation is not None and not is_gated:
        out = cast(Tensor, ACT2FN[activation](out))
    return out.t()[None]


def _gated_delta_rule(
    handler: StateHandler,
    query: Tensor,  # [1, num_tokens, num_groups, key size]
    key: Tensor,  # [1, num_tokens, num_groups, key size]
    value: Tensor,  # [1, num_tokens, num_heads, value size]
    g: Tensor,  # [1, num_tokens, num_heads] or, with a decay per channel, [1, num_tokens, num_heads, key size]
    beta: Tensor,  # [1, num_tokens, num_heads]
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    queries, keys = query[0].float(), key[0].float()
    if use_qk_l2norm_in_kernel:
        queries, keys = _normalized(queries), _normalized(keys)
    decay = torch.exp(g[0].float())
    mixer = LinearAttention(
        queries * queries.shape[-1] ** -0.5,
        keys,
        value[0].float(),
        decay if decay.dim() == 3 else decay[..., None],
        beta[0].float(),
    )
    return handler.advance(mixer).to(query.dtype)[None], None


def _normalized(x: Tensor) -> Tensor:
    """Returns vectors of length 1, but for an epsilon."""
    if x.device.type == "cpu" and load_kernels() is not None:  # length 1 is a root mean square of size ** -0.5
        size = x.shape[-1]
        return cast(Tensor, torch.ops.twostep.rms_norm(x, torch.full((size,), size**-0.5), _EPS / size))
    return x * torch.rsqrt(halved_sum(x * x, -1) + _EPS)[..., None]


def _mamba2_scan(
    handler: StateHandler,
    hidden_states: Tensor,  # [1, num_tokens, num_heads, head size]
    dt: Tensor,  # [1, num_tokens, num_heads]
    A: Tensor,  # [num_heads]
    B: Tensor,  # [1, num_tokens, num_groups, state size]
    C: Tensor,  # [1, num_tokens, num_groups, state size]
    D: Tensor | None = None,  # [num_heads]
    dt_bias: Tensor | None = None,  # [num_heads]
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    x, time_step = hidden_states[0].float(), dt[0]
    if dt_bias is not None:
        time_step = time_step + dt_bias.to(time_step.dtype)
    if dt_softplus:
        time_step = functional.softplus(time_step)
    time_step = torch.clamp(time_step, *dt_limit).float()
    decay = torch.exp(A.float() * time_step)[..., None]
    mixer = LinearAttention(C[0].float(), B[0].float(), x * time_step[..., None], decay, None)
    out = handler.advance(mixer)
    return (out if D is None else out + D.float()[:, None] * x)[None]


def _mamba_scan(
    handler: StateHandler,
    hidden_states: Tensor,  # [1, channels, num_tokens]
    dt: Tensor,  # [1, channels, num_tokens]
    A: Tensor,  # [channels, state size]
    B: Tensor,  # [1, state size, num_tokens]
    C: Tensor,  # [1, state size, num_tokens]
    D: Tensor | None = None,  # [channels]
    z: Tensor | None = None,  # [1, channels, num_tokens]
    delta_bias: Tensor | None = None,  # [channels]
    delta_softplus: bool = False,
    **_: Any,
) -> Tensor:
    x, time_step = hidden_states[0].t().float(), dt[0].t()
    if delta_bias is not None:
        time_step = time_step + delta_bias.to(time_step.dtype)
    if delta_softplus:
        time_step = functional.softplus(time_step)
    mixer = SelectiveScan(x, time_step.float(), A.float(), B[0].t().float(), C[0].t().float())
    out = handler.advance(mixer)
    if D is not None:
        out = out + x * D.float()
    if z is not None:
        out = out * functional.silu(z[0].t().float())
    return out.t()[None].to(hidden_states.dtype)


_FUNCTIONS: Mapping[str, Function] = {
    "causal_conv1d_fn": _causal_conv1d,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _gated_delta_rule,
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba_selective_scan": _mamba_scan,
}
"""Name in transformers' code -> what takes its place; its first argument is the handler."""
