"""The MTP head of the embedded model as it is trained: passes over all positions of a text at once.

In a chain of drafts the first pass reads the model's hidden states, and each further one those of the pass before it; a
token of the n-th draft sees keys and values of the first pass, but for its last n - 1 positions, where it sees those of
the drafts before it. Training runs all of that for every position (as EAGLE-3 is trained: Li et al. 2025).
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

__all__ = ["MtpHead"]


class MtpHead(nn.Module):
    """Its parameters are called as in Qwen3-Next's checkpoints, behind `mtp.`. It starts as the model's last layer."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        hidden_size = model.config.hidden_size
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False, dtype=model.dtype)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            copy.deepcopy(model.model.norm) for _ in range(3)
        )
        self.layers = nn.ModuleList([copy.deepcopy(model.model.layers[-1])])
        with torch.no_grad():
            self.pre_fc_norm_embedding.weight.fill_(1.0)
            self.pre_fc_norm_hidden.weight.fill_(1.0)

    def forward(
        self, embeddings: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], num_passes: int
    ) -> list[Tensor]:
        """embeddings and the model's hidden states [B, T, H] -> the hidden states [B, T, H] of each pass. Those of the
        first `n` positions of pass `n`, counted from 0, mean nothing."""
        outputs: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for _ in range(num_passes):
            hidden = self._layer(self.fc(self.joined(embeddings, hidden)), rotary, keys, values)
            outputs.append(hidden)
        return outputs

    def joined(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Returns what the projection reads of each token and of the hidden state before it [B, T, 2 * H]."""
        before = F.pad(hidden[:, :-1], (0, 0, 1, 0))
        return torch.cat((self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(before)), dim=-1)

    def _layer(self, x: Tensor, rotary: tuple[Tensor, Tensor], keys: list[Tensor], values: list[Tensor]) -> Tensor:
        layer: Any = self.layers[0]
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        heads = (*x.shape[:2], -1, attention.head_dim)
        query, key, value = (
            linear(normed).view(heads).transpose(1, 2)
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
        )  # [B, heads, T, D]
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        groups = attention.num_key_value_groups
        keys.append(key.repeat_interleave(groups, dim=1))
        values.append(value.repeat_interleave(groups, dim=1))
        attended = _attend(query * attention.scaling, keys, values).transpose(1, 2).flatten(2)
        x = x + attention.o_proj(attended)
        return cast(Tensor, self.norm(x + layer.mlp(layer.post_attention_layernorm(x))))


def _attend(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Returns what the last pass attends to [B, heads, T, D]: a pass `n` sees of the first one positions up to its own
    less `n`, and behind them one position of each pass."""
    distance = len(keys) - 1
    length = query.shape[2]
    mask = torch.ones(length, length, dtype=torch.bool).tril(-distance)
    scores = [(query @ keys[0].mT).masked_fill(~mask, -1e9)]
    own = range(1, len(keys))
    scores += [(query * _later(keys[each], distance - each)).sum(-1, keepdim=True) for each in own]
    weights = torch.cat(scores, dim=-1).softmax(-1, dtype=torch.float32).to(query.dtype)
    attended = weights[..., :length] @ values[0]
    for each in own:
        attended = attended + weights[..., length + each - 1, None] * _later(values[each], distance - each)
    return attended


def _later(x: Tensor, num_positions: int) -> Tensor:
    """Moves the positions of x [..., T, D]."""
    return F.pad(x[..., : x.shape[-2] - num_positions, :], (0, 0, num_positions, 0))
