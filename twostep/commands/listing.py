"""The commands of `twostep`, by name."""

__all__ = ["COMMANDS"]

COMMANDS = {
    "serve": "serve a model over HTTP",
    "chat": "talk with a model, here or on a server",
    "run": "print a model's answer to one prompt",
    "doctor": "tell what this machine has, and what is slow and why",
    "plan": "tell what a model will take here, without loading it",
    "models": "list the models that were downloaded",
    "pull": "download a model from the Hugging Face hub",
    "bench": "put load on a server, and measure it",
    "trace": "turn what serve --trace wrote into a timeline for Perfetto",
    "key": "make an API key for --api-keys-file",
    "completion": "print a completion script for bash, zsh or fish",
}
"""Every command and what it does."""
