"""The YAML file of --config as a source of settings for pydantic."""

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from engine.core.errors import ConfigError
from server.settings.strict_yaml import RepeatedKeyError, load_yaml, problem_of


class SettingsFile(PydanticBaseSettingsSource):
    """Reads settings from a YAML file, whose keys are the flags' names, with - or _. Raises ConfigError if the file
    cannot be read or has other keys."""

    def __init__(self, settings_cls: type[BaseSettings], path: str | Path | None) -> None:
        super().__init__(settings_cls)
        self._values = {} if path is None else self._read(Path(path).expanduser())

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self._values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self._values

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            content = load_yaml(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"--config: {path} cannot be read: {error.strerror}.") from error
        except RepeatedKeyError as error:
            raise ConfigError(f"--config: {path}: {error}.") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"--config: {path} is not YAML: {problem_of(error)}.") from None
        if not isinstance(content, dict | None):
            raise ConfigError(f"--config: {path} must hold lines such as 'port: 8000'.")
        return dict(self._known(path, key, value) for key, value in (content or {}).items())

    def _known(self, path: Path, key: object, value: Any) -> tuple[str, Any]:
        name = str(key).replace("-", "_")
        names = self.settings_cls.model_fields.keys() - {"config"}
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {close[0].replace('_', '-')}?" if close else "; twostep serve --help lists all."
            raise ConfigError(f"--config: {path} has the unknown key {key}{hint}")
        return name, value
