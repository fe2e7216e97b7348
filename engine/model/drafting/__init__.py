"""Models and heads that draft tokens for a model."""
