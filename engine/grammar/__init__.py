"""Structured output: grammars are written, compiled and checked here, and say which tokens may come next."""
