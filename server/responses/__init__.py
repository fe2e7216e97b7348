"""/v1/responses between the validated request and the response: translate to chat, write items."""
