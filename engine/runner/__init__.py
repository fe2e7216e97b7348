"""A batch in, tokens out: one forward pass over a step's tokens, and sampling from its logits."""
