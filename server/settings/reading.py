"""Settings from what was given: validated, with errors of one sentence that names where the wrong value came from."""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import SettingsError

from engine.core.errors import ConfigError
from server.settings.settings import Settings

__all__ = ["flag_of", "read_settings"]

_RULES = {
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "byte_size": "a size such as 2GiB",
    "byte_size_unit": "a size such as 2GiB",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "literal_error": "one of {expected}",
}
"""pydantic's kinds of errors -> what a value must be."""


def flag_of(name: str) -> str:
    """Returns the flag of the setting with this name."""
    return "--" + name.replace("_", "-")


def read_settings(flags: Mapping[str, Any]) -> Settings:
    """Returns the settings: flags over environment over YAML file over defaults. Raises ConfigError, which names the
    setting at fault."""
    _check_environment()
    try:
        settings = Settings(**flags)
    except ValidationError as error:
        problem = error.errors()[0]
        name = str(problem["loc"][0])
        message = _message_of(problem)
        if problem["input"] is None:
            raise ConfigError(f"{_source_of(name, flags)} has no value: leave it out for the default.") from None
        is_told = isinstance(problem["input"], list)  # what is wrong with a list names the item
        got = "" if is_told or name in ("api_key", "prefill_api_key") else f", got {problem['input']!r}"
        raise ConfigError(f"{_source_of(name, flags)}: {message}{got}.") from None
    except SettingsError as error:
        raise ConfigError(f"{error}.") from None
    _check_no_empty_key(settings, flags)
    return settings


def _message_of(problem: ErrorDetails) -> str:
    """Returns what is wrong with a value, in this program's words where pydantic's are about its own types."""
    rule = _RULES.get(problem["type"])
    if rule is None:
        return problem["msg"].removeprefix("Value error, ")
    return "must be " + rule.format(**problem.get("ctx", {}))


def _check_no_empty_key(settings: Settings, flags: Mapping[str, Any]) -> None:
    """Raises ConfigError if an API key was given and is empty: a secret that failed to resolve must not open the
    server."""
    is_given = "api_key" in settings.model_fields_set or any(name.upper() == "TWOSTEP_API_KEY" for name in os.environ)
    if is_given and not settings.api_key:
        raise ConfigError(f"{_source_of('api_key', flags)} is empty: leave it out for a server without keys.")


def _check_environment() -> None:
    """Raises ConfigError for a TWOSTEP_* variable that nearly names a setting. Other variables of the prefix are
    ignored: Kubernetes sets some for services."""
    names = [name.upper() for name in Settings.model_fields]
    for variable in os.environ:
        name = variable.upper().removeprefix("TWOSTEP_")
        if name != variable.upper() and name not in names and (close := get_close_matches(name, names, 1, 0.75)):
            raise ConfigError(f"{variable} is no setting; did you mean TWOSTEP_{close[0]}?")


def _source_of(name: str, flags: Mapping[str, Any]) -> str:
    """Returns the name of the flag, variable or YAML key that the setting's value came from."""
    variable = f"TWOSTEP_{name.upper()}"
    if name in flags:
        return "MODEL" if name == "model" else flag_of(name)
    if any(key.upper() == variable for key in os.environ):
        return variable
    return f"{name.replace('_', '-')} in the --config file"
