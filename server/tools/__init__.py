"""Tool calls and reasoning in a model's output: parsed while the text arrives, and turned into grammars. No I/O."""
