"""Scheduling policy: which requests run in the next step, with how many tokens, in which KV blocks. No tensors."""
