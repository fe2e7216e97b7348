"""The inference engine: token ids in, token ids out; continuous batching over a paged KV cache, two phases apart.

In the order in which a request passes through them: `client` admits it and keeps its stream, `process` carries it to
the engine process and back over that process's death, `engine.py` schedules, runs and updates, `scheduling` chooses
each step, `grammar` restricts which tokens may come next, `runner` computes the batch with the model that `model` has
loaded from a `checkpoint`, over `attention`, `weights` and `kernels`. `core` holds the values that all of them share,
`host` sets up the machine and its libraries, `text` converts between text and tokens. Imports go one way, as
`MAY_IMPORT` in tests/test_layout.py draws it.

Importing this package imports nothing else. `engine.client.async_engine.AsyncEngine` runs the engine in a process of
its own and imports no torch; `engine.assembly` makes one that runs in this process and imports it.
"""
