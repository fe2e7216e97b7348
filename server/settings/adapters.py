"""Adapters as --lora gives them: NAME=DIR."""

from collections.abc import Sequence
from os.path import expanduser

from engine.core.adapters import AdapterSource
from engine.core.errors import ConfigError


def adapter_sources(given: Sequence[str], model_names: Sequence[str]) -> tuple[AdapterSource, ...]:
    """Returns the adapters. Raises ConfigError unless each has a directory and a name of its own."""
    sources = []
    for each in given:
        name, _, path = (part.strip() for part in each.partition("="))
        if not name or not path:
            raise ConfigError(f"--lora {each}: write NAME=DIR, the name that clients use and the adapter's directory.")
        sources.append(AdapterSource(name, expanduser(path)))
    names = [*model_names, *(source.name for source in sources)]
    if repeated := [name for name in names[len(model_names) :] if names.count(name) > 1]:
        raise ConfigError(f"--lora: the name {repeated[0]} is given twice, or is the model's own.")
    return tuple(sources)
