"""The steps of loading a model: its configuration, where it runs, its weights, and what its layers are."""
