"""Trains the embedded model: its corpus from Python's documentation, its tokenizer, its weights."""
