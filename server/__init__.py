"""The OpenAI-compatible HTTP face of the engine: validation, text, streams, metrics. Knows no tensors."""
