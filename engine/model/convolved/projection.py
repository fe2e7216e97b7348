"""Compressed convolutional attention (ZAYA): queries and keys are convolved over tokens, first each number by itself
and then those of each head together, and half of a value is of the token before. Sums have a fixed order."""

from typing import Any

import torch
from torch import Tensor, nn

from engine.mixers.registry import advance
from engine.mixers.row_window import RowWindow
from engine.mixers.sums import halved_sum

__all__ = ["ConvolvedProjection", "LengthNorm"]


class HeadConvolution(nn.Module):
    """A convolution of the numbers of each head, over the last tokens of a window, as a linear layer for each head."""

    def __init__(self, convolution: Any) -> None:
        super().__init__()
        weight: Tensor = convolution.weight.detach().transpose(1, 2).flatten(1)  # [heads * size, taps * size]
        self.heads = nn.ModuleList(map(_linear_of, weight.chunk(convolution.groups)))
        bias = convolution.bias.detach().to(torch.float32, copy=True)
        self.bias = nn.Buffer(bias.view(convolution.groups, -1), persistent=False)

    def forward(self, windows: Tensor) -> Tensor:  # [T, taps, heads * size] -> [T, heads, size]
        heads = windows.view(*windows.shape[:2], len(self.heads), -1).permute(2, 0, 1, 3).flatten(2)
        products = [linear(rows) for linear, rows in zip(self.heads, heads.unbind(0), strict=True)]
        return (torch.stack(products, dim=1).float() + self.bias).to(windows.dtype)


def _linear_of(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


class ConvolvedProjection(nn.Module):
    """Makes queries, keys and values of a layer's input."""

    def __init__(self, projection: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj = projection.q_proj, projection.k_proj
        self.v_proj_current, self.v_proj_delayed = projection.v_proj_current, projection.v_proj_delayed
        convolution = projection.conv_qk_depthwise
        taps = convolution.weight.detach()[:, 0].to(torch.float32, copy=True).t().contiguous()
        self.taps = nn.Buffer(taps, persistent=False)  # [taps, channels]
        self.bias = nn.Buffer(convolution.bias.detach().to(torch.float32, copy=True), persistent=False)
        self.convolution = HeadConvolution(projection.conv_qk_grouped)
        self._num_taps, self._head_dim = int(projection.grouped_kernel_size), int(projection.head_dim)
        self._num_heads, self._num_in_group = int(projection.num_attention_heads), int(projection.num_key_value_groups)

    def forward(self, hidden_states: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states [1, T, H] -> queries, keys and values [1, T, heads, size]."""
        query, key = self.q_proj(hidden_states)[0], self.k_proj(hidden_states)[0]
        windows = advance(RowWindow(torch.cat((query, key), dim=-1), len(self.taps) + self._num_taps - 2))
        convolved = self.convolution(self._smoothed(windows))  # [T, heads of queries and keys, size]
        query, key = self._means(self._heads(query), self._heads(key))
        sizes = [self._num_heads, convolved.shape[1] - self._num_heads]
        query, key = (one + mean for one, mean in zip(convolved.split(sizes, dim=1), (query, key), strict=True))
        return query[None], key[None], self._values(hidden_states)[None]

    def _smoothed(self, windows: Tensor) -> Tensor:
        """Returns the last tokens of windows [T, tokens, channels], each convolved: [T, taps of heads, channels]."""
        total = self.bias
        for number, weight in enumerate(self.taps):
            total = total + windows[:, number : number + self._num_taps].float() * weight
        return total.to(windows.dtype)

    def _means(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mean of each query and its key, and of the group of queries of each key that of these."""
        both = (query + key.repeat_interleave(self._num_in_group, dim=1)) * 0.5
        of_groups = both.view(len(both), -1, self._num_in_group, self._head_dim).float()
        return both, (halved_sum(of_groups, 2) / self._num_in_group).to(both.dtype)

    def _values(self, hidden_states: Tensor) -> Tensor:
        before = advance(RowWindow(self.v_proj_delayed(hidden_states)[0], 1))[:, 0]
        return self._heads(torch.cat((self.v_proj_current(hidden_states)[0], before), dim=-1))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, self._head_dim)


class LengthNorm(nn.Module):
    """Gives queries and keys one length, and scales keys of each head."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.temp, self._length = norm.temp, float(norm.head_dim_scale)

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:  # [1, T, heads, size]
        return self._normed(query), self._normed(key) * self.temp[:, None]

    def _normed(self, heads: Tensor) -> Tensor:
        wide = heads.float()
        lengths = torch.sqrt(halved_sum(wide * wide, -1)).clamp_min(torch.finfo(heads.dtype).eps)
        return (wide * (self._length / lengths)[..., None]).to(heads.dtype)
