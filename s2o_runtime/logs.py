"""How the commands say what they do on standard error: as lines of text or, on request, as lines of JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any

from s2o_runtime.errors import ConfigError

VARIABLE = "S2O_LOG"  # "json": everything on standard error is JSON; "text", the default
FORMATS = ("text", "json")
FIELDS = "s2o_fields"  # attribute of a log record: what a line of JSON has besides its message


class JsonLines(logging.Formatter):
    """One JSON object for each record: time (UTC), level, logger, message, and what `say` was given."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def wants_json() -> bool:
    """Whether the environment variable S2O_LOG asks for JSON."""
    return os.environ.get(VARIABLE) == "json"


def set_up(level: int, *, as_json: bool, program: str = "%(name)s") -> None:
    """Let this process's log go to standard error.

    Args:
        level: the lowest that is shown.
        as_json: as lines of JSON. The commands ask for it by setting S2O_LOG, so that `wants_json` knows it too.
        program: what lines of text begin with; by default the logger's name.

    Raises:
        ConfigError: S2O_LOG has a value that is not known.
    """
    value = os.environ.get(VARIABLE) or "text"
    if value not in FORMATS:
        raise ConfigError(f"{VARIABLE} {value!r} is not known: use one of {FORMATS}")
    if as_json:
        os.environ[VARIABLE] = "json"
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if wants_json() else logging.Formatter(f"{program}: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def say(logger: str, message: str, fields: Mapping[str, Any] | None = None, level: int = logging.INFO) -> None:
    """Write one line to standard error, whatever level is logged: the message, or with `wants_json` a JSON object.

    Args:
        logger: the name that the line has in JSON.
        message: one line.
        fields: what the JSON object has besides.
        level: of the line in JSON.
    """
    if not wants_json():
        print(message, file=sys.stderr, flush=True)
        return
    record = logging.LogRecord(logger, level, "", 0, message, None, None)
    setattr(record, FIELDS, dict(fields or {}))
    print(JsonLines().format(record), file=sys.stderr, flush=True)


@lru_cache(maxsize=256)
def log_once(level: int, message: str, *arguments: object) -> None:
    """Log a message of the runtime, the first time that this process has it."""
    logging.getLogger("s2o_runtime").log(level, message, *arguments)
