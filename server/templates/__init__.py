"""Messages to prompt text: the choice of a chat template, its input, and its rendering."""
