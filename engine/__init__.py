"""The inference engine: token ids in, token ids out; continuous batching over a paged KV cache, two phases apart.

In the order in which a request passes through them: `client` admits it and keeps its stream, `process` carries it to
the engine process and back over that process's death, `engine.py` schedules, runs and updates, `scheduling` chooses
each step, `grammar` says which tokens may come, `runner` computes the batch with what `model` has made of a
`checkpoint`, over `attention`, `weights` and `kernels`. `core` is what all of them speak, `host` what the machine must
be told, `text` is tokens and text. Imports go one way, as `MAY_IMPORT` in tests/test_layout.py draws it.

Importing this imports nothing. `engine.client.async_engine.AsyncEngine` is the engine behind a process of its own and
imports no torch; `engine.engine.Engine` runs in-process and does.
"""
