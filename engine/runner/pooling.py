"""Last-token pooling: a prompt's embedding is the hidden state at its last token, scaled to unit length.

That is the input of the language-model head, after the final norm, of the served model itself, which may have been
trained to predict tokens only. Models trained to embed (causal decoders with last-token pooling) return the embeddings
that they were trained for.
"""

import torch
from torch import Tensor


def embedding_bytes(hidden: Tensor) -> bytes:
    """Returns `hidden` [hidden_size] as a unit vector of little-endian float32."""
    vector = hidden.to(torch.float32)
    length = torch.linalg.vector_norm(vector, dtype=torch.float64).clamp(min=torch.finfo(torch.float32).tiny)
    return bytes((vector / length).to(torch.float32).cpu().numpy().astype("<f4").data)
