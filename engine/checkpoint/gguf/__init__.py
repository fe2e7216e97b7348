"""GGUF files (llama.cpp's format) as checkpoints: what their metadata and their blocks of numbers mean."""
