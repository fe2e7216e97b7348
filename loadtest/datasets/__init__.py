"""Requests that are read from a file: ShareGPT conversations, traces of lengths and prefixes, and lines of requests."""
