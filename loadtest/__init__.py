"""A load generator for OpenAI-compatible servers.

It talks HTTP only: it imports neither `server` nor `engine`, and measures any server that streams.
"""
