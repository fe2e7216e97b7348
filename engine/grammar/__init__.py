"""Structured output: writes, checks and compiles grammars, and computes masks of the tokens they allow next."""
