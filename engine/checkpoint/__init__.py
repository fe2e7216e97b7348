"""A model's files, in a directory or on the Hugging Face hub, and its config.json. No weights are read here."""
