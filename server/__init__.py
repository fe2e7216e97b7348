"""The OpenAI-compatible HTTP server in front of the engine: validation, chat templates, streams, metrics. It imports no
tensor library."""
