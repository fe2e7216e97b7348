"""Layers that mix tokens by a state that each request carries from token to token, instead of by attention."""
