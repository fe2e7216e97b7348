"""API keys: where they are kept, which one a request carries, and what that key may do."""
