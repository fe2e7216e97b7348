"""YAML in which no key stands twice: the usual reader would take the last one and say nothing."""

from collections import Counter
from collections.abc import Hashable
from typing import Any

import yaml


class RepeatedKeyError(yaml.YAMLError):
    """A mapping has this key twice."""

    def __init__(self, key: object) -> None:
        super().__init__(f"it has {str(key)[:64]!r} twice")


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        counts = Counter((key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for (_, key), count in counts.items():
            if count > 1:
                raise RepeatedKeyError(key)
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> Any:
    """Plain data. Raises YAMLError, of which RepeatedKeyError is one."""
    try:
        return yaml.load(text, _Loader)
    except ValueError as error:  # of what looks like a date and is none
        raise yaml.YAMLError(str(error)) from error
