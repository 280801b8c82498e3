"""From how many keys to how many a profile's settings are used."""

from __future__ import annotations

TRUSTED_BEYOND = 1.5  # times the longest calibrated length: how far its settings are taken to hold


def too_short(keys: int, min_length: int) -> str | None:
    """Why a prompt of so many keys is too short for a profile, or None.

    Args:
        min_length: the shortest calibrated length.
    """
    return f"shorter than the shortest calibrated length, {min_length}" if keys < min_length else None


def too_long(keys: int, max_length: int | None) -> str | None:
    """Why a prompt of so many keys is too long for a profile, or None.

    Args:
        max_length: `TRUSTED_BEYOND` times the longest calibrated length; None for no limit.
    """
    if max_length is None or keys <= max_length:
        return None
    return f"longer than {max_length} keys, {TRUSTED_BEYOND:g} times the longest calibrated length"
