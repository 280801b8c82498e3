"""A result's time and software versions."""

from __future__ import annotations

import platform
from datetime import datetime, timezone
from importlib import metadata

import s2o_runtime

LIBRARIES = ("torch", "triton", "transformers", "optuna")


def collect_versions() -> dict[str, str]:
    """Return the versions of a calibration's software, by name."""
    return {"s2o": s2o_runtime.__version__, "python": platform.python_version()} | {
        name: metadata.version(name) for name in LIBRARIES
    }


def format_now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
