"""Messages to prompt text: how a chat template is chosen, what reaches it, and what it renders."""
