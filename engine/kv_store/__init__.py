"""The KV store: full blocks and copies of states in files, which outlive memory, the engine and the server."""
