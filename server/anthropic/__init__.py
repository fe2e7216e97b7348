"""/v1/messages, Anthropic's API, between the validated request and the response: translate to chat, write blocks."""
