"""Tool calls and reasoning in a model's text: read while the text arrives, and written for a grammar. No I/O."""
