"""/v1/chat/completions between the validated request and the response: render, plan, parse, format."""
