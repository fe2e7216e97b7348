"""Runs a batch on a loaded model: one forward pass over a step's tokens, and sampling from its logits."""
