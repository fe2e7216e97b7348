"""The embedded model's training: its corpus from Python's documentation, its tokenizer, its weights."""
