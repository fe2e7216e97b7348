"""Last-token pooling: a prompt's embedding is the hidden state at its last token, scaled to unit length.

That is the input of the language-model head, after the final norm, of the served model itself, which may have been
trained to predict tokens only. Models trained to embed (causal decoders with last-token pooling) return the embeddings
that they were trained for.
"""

import torch
from torch import Tensor, nn


class HeadInputs:
    """Records the input of the language-model head: hidden states at the positions whose logits are computed."""

    def __init__(self, head: nn.Module) -> None:
        self.newest = torch.empty(0)
        """Hidden states of the newest forward pass, [num_kept, hidden_size], in the model's dtype."""
        head.register_forward_pre_hook(self._record)

    def _record(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.newest = args[0].flatten(0, -2)


def embedding_bytes(hidden: Tensor) -> bytes:
    """Returns `hidden` [hidden_size] as a unit vector of little-endian float32."""
    vector = hidden.to(torch.float32)
    length = torch.linalg.vector_norm(vector, dtype=torch.float64).clamp(min=torch.finfo(torch.float32).tiny)
    return bytes((vector / length).to(torch.float32).cpu().numpy().astype("<f4").data)
