"""Embeddings of the n-grams that end with a token, whose rows are found by hashes of the tokens' ids."""

from typing import Any

import torch
from torch import Tensor, nn

from engine.mixers.registry import advance
from engine.mixers.token_window import NO_TOKEN, TokenWindow

__all__ = ["NGramEmbedding"]


class NGramEmbedding(nn.Module):
    """Looks up n-grams of two and more tokens, each by several hashes. Tokens up to an EOS token before the last one
    count as EOS tokens, and so do those that are not there."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.ngram_embedding = embedding.ngram_embedding
        self.multipliers = nn.Buffer(embedding.layer_multipliers, persistent=False)  # [n]
        sizes, offsets = embedding.ngram_heads_vocab_sizes, embedding.ngram_heads_offsets
        self.sizes, self.offsets = nn.Buffer(sizes, persistent=False), nn.Buffer(offsets, persistent=False)  # [hashes]
        self._num_before, self._num_hashes = int(embedding.ngram_size) - 1, int(embedding.heads_per_ngram)
        self._eos = int(embedding.eos_token_id)

    def forward(self, token_ids: Tensor) -> Tensor:  # [1, T] -> [1, T, size]
        window = advance(TokenWindow(token_ids[0].long(), self._num_before))
        rows = self._hashed(self._of_own_text(window.flip(1)))
        embedded: Tensor = self.ngram_embedding(rows)
        return embedded.flatten(1)[None]

    def _of_own_text(self, tokens: Tensor) -> Tensor:
        """Returns tokens [T, n], newest first, with EOS tokens in place of those of a text before."""
        before = tokens[:, 1:]
        is_other = ((before == self._eos) | (before == NO_TOKEN)).cumsum(1) > 0
        return torch.cat((tokens[:, :1], before.masked_fill(is_other, self._eos)), dim=1)

    def _hashed(self, tokens: Tensor) -> Tensor:
        """Returns the rows [T, hashes] of n-grams of tokens [T, n], newest first."""
        products = tokens * self.multipliers
        mixed, mixes = products[:, 0], []
        for product in products[:, 1:].unbind(1):
            mixed = mixed ^ product
            mixes.append(mixed[:, None].expand(-1, self._num_hashes))
        return torch.cat(mixes, dim=1) % self.sizes + self.offsets
