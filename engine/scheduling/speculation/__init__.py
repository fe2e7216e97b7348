"""Speculative decoding: what proposes draft tokens, how many of them a step verifies, and whether they pay."""
