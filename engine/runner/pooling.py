"""The embedding of a prompt: the model's last hidden state at its last token, scaled to unit length.

That is what the language-model head would read: after the final norm, and of the served model itself, which was
trained to predict tokens. Models trained to embed (with a causal decoder and last-token pooling) give theirs.
"""

import torch
from torch import Tensor, nn


class HeadInputs:
    """Sees what the language-model head is given: the hidden states at the positions whose logits are asked for."""

    def __init__(self, head: nn.Module) -> None:
        self.newest = torch.empty(0)
        """Those of the newest forward pass, [num_kept, hidden_size], in the model's number format."""
        head.register_forward_pre_hook(self._see)

    def _see(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.newest = args[0].flatten(0, -2)


def embedding_bytes(hidden: Tensor) -> bytes:
    """`hidden` [hidden_size] as a unit vector: little-endian float32."""
    vector = hidden.to(torch.float32)
    length = torch.linalg.vector_norm(vector, dtype=torch.float64).clamp(min=torch.finfo(torch.float32).tiny)
    return bytes((vector / length).to(torch.float32).cpu().numpy().astype("<f4").data)
