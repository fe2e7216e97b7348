"""API keys: the file that holds them, the one that a request carries, and its limit of concurrent requests."""
