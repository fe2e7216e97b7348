"""The Python API: a model in the engine process of its own, asked without HTTP, by the server's code behind it."""
