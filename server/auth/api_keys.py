"""API keys and their terms, as --api-key and the YAML file of --api-keys-file give them:

    alice:
      sha256: 2c26b46b...     # of the key; `twostep key alice` makes both
      weight: 2               # share of the engine against other keys; default 1
      max-concurrent: 8       # requests at once; default no limit

A plain SHA-256 is enough at rest: such a key is 256 random bits, which no dictionary attack finds, so a slow password
hash would protect nothing, and every request would pay for it.
"""

import hashlib
import secrets
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from engine.core.errors import ConfigError
from server.settings.strict_yaml import RepeatedKeyError, load_yaml, problem_of

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key, as the hash of its secret, and its terms."""

    name: str
    digest: bytes
    weight: float = 1.0
    """Share of the engine, relative to other keys' weights."""
    max_concurrent: int | None = None
    """POST requests at once; None for no limit."""

    def salt(self, cache_salt: str) -> str:
        """Returns the prefix cache's salt for a request of this key with `cache_salt`. No two keys share a salt: else
        how fast a response comes would tell what prompts others sent.

        Names and salts have no null characters.
        """
        return f"{self.name}\0{cache_salt}" if self.name else cache_salt


NOBODY = ApiKey("", b"")
"""The key of every request to a server without API keys."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$")]
    weight: float = Field(1.0, ge=0.001, le=1000)
    max_concurrent: int | None = Field(None, ge=1, alias="max-concurrent")


_FIELDS = tuple(field.alias or name for name, field in _Entry.model_fields.items())
_FILE = TypeAdapter(dict[Name, _Entry])


def digest_of(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def read_keys(path: Path) -> list[ApiKey]:
    """Returns the keys in a file. Raises ConfigError, which names the entry at fault but shows nothing of its hash."""
    try:
        content = load_yaml(path.expanduser().read_text(encoding="utf-8"))
        entries = _FILE.validate_python(content or {})
    except OSError as error:
        raise ConfigError(f"--api-keys-file: {path} cannot be read: {error.strerror}.") from error
    except RepeatedKeyError as error:
        raise ConfigError(f"--api-keys-file: {path}: {error}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-keys-file: {path} is not YAML: {problem_of(error)}.") from None
    except ValidationError as error:
        raise ConfigError(f"--api-keys-file: {path}: {_describe(error)}") from None
    return [
        ApiKey(name, bytes.fromhex(entry.sha256), entry.weight, entry.max_concurrent) for name, entry in entries.items()
    ]


def _describe(error: ValidationError) -> str:
    """Returns one sentence about the most helpful of the file's problems."""
    problems = error.errors(include_input=False)
    # A misspelt field explains a missing one.
    problem = next((each for each in problems if each["type"] == "extra_forbidden"), problems[0])
    *_, last = place = [str(part)[:64] for part in problem["loc"]] or ["its content"]
    message = f"{problem['msg']}."
    if problem["type"] == "extra_forbidden":
        close = get_close_matches(last, _FIELDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(_FIELDS)}."
        message = f"there is no such field; {hint}"
    elif problem["type"] == "model_type":
        message = f"it needs fields, of {', '.join(_FIELDS)}."
    elif last == "[key]" and problem["type"] == "string_type":
        message = "to be a name, it must stand in quotes."
    return f"{'.'.join(place).removesuffix('.[key]')}: {message}"


def plain_keys(given: tuple[str, ...]) -> list[ApiKey]:
    """Returns the keys of --api-key, named `default`, or `key-1`, `key-2`, ... Raises ConfigError."""
    if any(not secret or secret != secret.strip() for secret in given):
        raise ConfigError("--api-key: a key must not be empty, nor begin or end with white space.")
    names = ["default"] if len(given) == 1 else [f"key-{number}" for number in range(1, len(given) + 1)]
    return [ApiKey(name, digest_of(_bytes_of(secret))) for name, secret in zip(names, given, strict=True)]


def _bytes_of(secret: str) -> bytes:
    """Returns the key's bytes as they were given: a locale without UTF-8 makes surrogates of them. Raises
    ConfigError."""
    try:
        return secret.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        raise ConfigError("--api-key: a key must not contain lone surrogates.") from None


def new_key(name: str) -> tuple[str, str]:
    """Returns a random secret and the entry of its key in the file. Raises ConfigError for an invalid name."""
    secret = f"sk-{secrets.token_urlsafe(32)}"
    quoted = name if name.isidentifier() and load_yaml(name) == name else f'"{name}"'  # 2024 and null are names, too
    try:
        entry = f'{quoted}:\n  sha256: "{digest_of(secret.encode()).hex()}"\n'
        _FILE.validate_python(load_yaml(entry))
    except (yaml.YAMLError, ValidationError):
        raise ConfigError(f"{name!r} cannot name a key: use letters, digits, '.', '_' and '-', at most 64.") from None
    return secret, entry
