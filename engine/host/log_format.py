"""How log lines are written, in this process and in those that it starts: as text, or each as one JSON object."""

import json
import logging
import os
from datetime import UTC, datetime

__all__ = ["JsonFormatter", "choose_format", "configure_root"]

_VARIABLE = "TWOSTEP_LOG_FORMAT"


class JsonFormatter(logging.Formatter):
    """Writes a record as one line of JSON: time, level, logger and message, and the record's `fields` if it has any."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def choose_format(name: str) -> None:
    """Sets the format, text or json, of this process and of those that it starts from now on."""
    os.environ[_VARIABLE] = name


def configure_root(level: int | str, text: str = "%(asctime)s %(levelname)s %(name)s: %(message)s") -> None:
    """Sends all records from this level up to standard error, in the chosen format; `text` is that of lines of text."""
    logging.basicConfig(level=level, format=text)
    if os.environ.get(_VARIABLE) == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())
