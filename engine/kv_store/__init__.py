"""The KV store: full blocks in files, which outlive memory, the engine and the server."""
