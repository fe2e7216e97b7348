"""Manifold-constrained hyper-connections (DeepSeek-V4, 2026): layers read and write a residual of several streams.

A layer's part reads a sum of the streams, and adds to each a share of its result; before that, streams are mixed by a
matrix whose rows and columns all sum to one, nearly. The weights of all that are a token's own. Every sum has a fixed
order here, and weights and sums are float32.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.model.compressed.plain_norm import norm_without_weight

__all__ = ["HyperConnection", "HyperDecoderLayer", "HyperHead"]

_TOKENS_AT_ONCE = 16
Results = TypeVar("Results", bound=tuple[Tensor, ...])


class Coefficients(nn.Module):
    """Multiplies as a router does, whose weight is not quantized, in float32."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().float(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        return functional.linear(x, self.weight)


class HyperConnection(nn.Module):
    """Weighs the streams before and behind a part of a layer."""

    def __init__(self, connection: Any, norm: Any) -> None:
        """`norm` is one of the model's, of whose kind this one's is."""
        super().__init__()
        self.coefficients, self.base, self.scale = Coefficients(connection.fn), connection.base, connection.scale
        self.norm = norm_without_weight(norm, connection.fn.shape[1])
        self._num_streams, self._num_rounds = int(connection.hc_mult), int(connection.hc_sinkhorn_iters)
        self.eps = _number(connection.hc_eps, self.base)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """streams [1, T, N, H] -> what the part reads [1, T, H], the shares of its result [1, T, N], and the matrix
        [1, T, N, N]."""
        read, post, mix = _in_pieces(self._read, streams)
        (_, post_base, mix_base), (_, post_scale, mix_scale) = self._parts(self.base), self.scale.unbind(0)
        shares = 2 * torch.sigmoid(post * post_scale + post_base)
        matrix = (mix * mix_scale + mix_base).unflatten(-1, (self._num_streams, -1))
        return read, shares, self._balanced(matrix)

    def _read(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = streams.float()
        pre, post, mix = self._parts(self.coefficients(self.norm(wide.flatten(2))))
        weights = torch.sigmoid(pre * self.scale[0] + self._parts(self.base)[0]) + self.eps
        return _weighed_sum(weights, wide).to(streams.dtype), post, mix

    def _parts(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """Splits numbers [..., (2 + N) * N] for what is read, for shares, and for the matrix."""
        num = self._num_streams
        return numbers[..., :num], numbers[..., num : 2 * num], numbers[..., 2 * num :]

    def _balanced(self, matrix: Tensor) -> Tensor:
        """Returns a matrix whose rows and columns sum to one, nearly (Sinkhorn and Knopp, 1967)."""
        powers = torch.exp(matrix - matrix.amax(dim=-1, keepdim=True))
        matrix = powers / _sum_over(powers, -1).unsqueeze(-1) + self.eps
        matrix = self._divided(matrix, -2)
        for _ in range(self._num_rounds - 1):
            matrix = self._divided(self._divided(matrix, -1), -2)
        return matrix

    def _divided(self, matrix: Tensor, dim: int) -> Tensor:
        return matrix / (_sum_over(matrix, dim).unsqueeze(dim) + self.eps)


class HyperHead(nn.Module):
    """Makes one stream of all, behind the last layer."""

    def __init__(self, head: Any, norm: Any) -> None:
        super().__init__()
        self.coefficients, self.base, self.scale = Coefficients(head.hc_fn), head.hc_base, head.hc_scale
        self.norm, self.eps = norm_without_weight(norm, head.hc_fn.shape[1]), _number(head.eps, self.base)

    def forward(self, streams: Tensor) -> Tensor:  # [1, T, N, H] -> [1, T, H]
        (collapsed,) = _in_pieces(self._collapsed, streams)
        return collapsed

    def _collapsed(self, streams: Tensor) -> tuple[Tensor]:
        wide = streams.float()
        weights = self.coefficients(self.norm(wide.flatten(2))) * self.scale.float() + self.base.float()
        return (_weighed_sum(torch.sigmoid(weights) + self.eps, wide).to(streams.dtype),)


class HyperDecoderLayer(nn.Module):
    """A layer of attention and experts, each of which reads and writes all streams."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.attn_hc, self.ffn_hc = layer.attn_hc, layer.ffn_hc

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None, **inputs: Any) -> Tensor:
        read, shares, matrix = self.attn_hc(hidden_states)
        output, _ = self.self_attn(self.input_layernorm(read), **inputs)
        hidden_states = _mixed(hidden_states, output, shares, matrix)
        read, shares, matrix = self.ffn_hc(hidden_states)
        output = self.mlp(self.post_attention_layernorm(read), input_ids=input_ids)
        return _mixed(hidden_states, output, shares, matrix)


def _number(value: float, like: Tensor) -> nn.Buffer:
    """Returns a number as a tensor, which is added in less time."""
    return nn.Buffer(torch.tensor(float(value), device=like.device), persistent=False)


def _weighed_sum(weights: Tensor, streams: Tensor) -> Tensor:  # [1, T, N], [1, T, N, H] -> [1, T, H]
    return _sum_over(weights[..., None] * streams, 2)


def _sum_over(terms: Tensor, dim: int) -> Tensor:
    """Sums over a dimension of few numbers as a tree of halves."""
    parts = [*terms.unbind(dim)]
    while len(parts) > 1:
        half = (len(parts) + 1) // 2
        parts = [a + b for a, b in zip(parts, parts[half:], strict=False)] + parts[len(parts) - half : half]
    return parts[0]


def _mixed(streams: Tensor, output: Tensor, shares: Tensor, matrix: Tensor) -> Tensor:
    """streams [1, T, N, H] -> the streams behind a part of a layer, whose `output` is [1, T, H]."""
    (mixed,) = _in_pieces(_mixed_piece, streams, output, shares, matrix)
    return mixed


def _mixed_piece(streams: Tensor, output: Tensor, shares: Tensor, matrix: Tensor) -> tuple[Tensor]:
    wide = streams.float()
    total = shares[..., None] * output.float()[:, :, None]
    for number in range(streams.shape[2]):
        total += matrix[:, :, number, :, None] * wide[:, :, number, None]
    return (total.to(streams.dtype),)


def _in_pieces(function: Callable[..., Results], *inputs: Tensor) -> Results:
    """Calls a function of each token alone, whose inputs and results are [1, T, ...], for so many tokens at once as the
    processor's caches hold."""
    if inputs[0].shape[1] <= _TOKENS_AT_ONCE:
        return function(*inputs)
    starts = range(0, inputs[0].shape[1], _TOKENS_AT_ONCE)
    pieces = [function(*(each[:, start : start + _TOKENS_AT_ONCE] for each in inputs)) for start in starts]
    return cast(Results, tuple(torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True)))
