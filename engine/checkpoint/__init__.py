"""Where the files of a model are, here or on the hub, and what their configuration says. Reads no weights."""
