"""When a result was made, and which software had a part in it."""

from __future__ import annotations

import platform
from datetime import datetime, timezone
from importlib import metadata

import s2o_runtime

LIBRARIES = ("torch", "triton", "transformers", "optuna")


def versions() -> dict[str, str]:
    """The versions of what had a part in a calibration, by name."""
    return {"s2o": s2o_runtime.__version__, "python": platform.python_version()} | {
        name: metadata.version(name) for name in LIBRARIES
    }


def now() -> str:
    """The time, to the second, in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
