"""Pure ASGI middlewares, outermost first: record, access, failures, (CORS,) auth, gate, body_limit."""
