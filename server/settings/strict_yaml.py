"""YAML in which no key may stand twice: PyYAML's loader would silently take the last one."""

from collections import Counter
from collections.abc import Hashable
from typing import Any

import yaml


class RepeatedKeyError(yaml.YAMLError):
    """A mapping of the YAML text has the same key twice."""

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
    """Returns the text's content as plain data. Raises YAMLError, of which RepeatedKeyError is a subclass."""
    try:
        return yaml.load(text, _Loader)
    except ValueError as error:  # something looks like a date and is none
        raise yaml.YAMLError(str(error)) from error


def problem_of(error: Exception) -> str:
    """Returns what is wrong with the YAML text, and where, without quoting any of it: it may be a secret."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    is_spelling = isinstance(error, yaml.scanner.ScannerError)  # others quote aliases, tags and values
    mark = (error.context_mark if is_spelling else None) or error.problem_mark
    where = f"line {mark.line + 1}" if mark else "somewhere"
    return ", ".join(filter(None, (where, error.context, error.problem))) if is_spelling else f"see {where}"
