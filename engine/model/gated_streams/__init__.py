"""Models whose layers read and write several streams through gates, and read n-grams of tokens (Qwen 4)."""
