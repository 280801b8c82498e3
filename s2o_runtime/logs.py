"""Logs of the commands on standard error: lines of text or, on request, lines of JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any

from .errors import ConfigError

VARIABLE = "S2O_LOG"  # "json": everything on standard error is JSON; "text", the default
FORMATS = ("text", "json")
FIELDS = "s2o_fields"  # attribute of a log record: further fields of its line of JSON


class JsonLines(logging.Formatter):
    """One JSON object for each record: time (UTC), level, logger, message, and the fields that `say` got."""

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


def should_write_json() -> bool:
    """Return whether the environment variable S2O_LOG asks for JSON."""
    return os.environ.get(VARIABLE) == "json"


def set_up(level: int, *, as_json: bool, program: str = "%(name)s") -> None:
    """Set this process's log up to go to standard error, from `level` on.

    as_json: as lines of JSON; S2O_LOG is set, so that `should_write_json` and child processes know it too. program: the
    beginning of lines of text. Raises ConfigError if S2O_LOG has a value that is not known.
    """
    value = os.environ.get(VARIABLE) or "text"
    if value not in FORMATS:
        raise ConfigError(f"{VARIABLE} {value!r} is not known: use one of {FORMATS}")
    if as_json:
        os.environ[VARIABLE] = "json"
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if should_write_json() else logging.Formatter(f"{program}: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def emit_line(logger: str, message: str, fields: Mapping[str, Any] | None = None, level: int = logging.INFO) -> None:
    """Write one line to standard error, whatever level is logged: the message, or a JSON object with all arguments."""
    if not should_write_json():
        print(message, file=sys.stderr, flush=True)
        return
    record = logging.LogRecord(logger, level, "", 0, message, None, None)
    setattr(record, FIELDS, dict(fields or {}))
    print(JsonLines().format(record), file=sys.stderr, flush=True)


@lru_cache(maxsize=256)
def log_once(level: int, message: str, *arguments: object) -> None:
    """Log a message of the runtime, the first time that this process has it."""
    logging.getLogger("s2o_runtime").log(level, message, *arguments)
