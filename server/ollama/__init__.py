"""Ollama's API as a translation to chat: its requests, its lines of JSON, and its descriptions of models."""
