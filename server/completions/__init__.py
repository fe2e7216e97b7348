"""/v1/completions between the validated request and the response: plan, generate, format."""
