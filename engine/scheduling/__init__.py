"""The policy: which request computes what in the next step, and which KV blocks it has for that. No tensors."""
