"""s2o-doctor with the calibrator: it knows aliases and GGUF files, and how a model would be calibrated."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from calibrate.recipe import DEFAULT_LENGTHS
from s2o_runtime.doctor.command import PROGRAM
from s2o_runtime.doctor.command import main as doctor

if TYPE_CHECKING:
    from s2o_runtime.doctor.profile_check import ModelView


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Run the command under its name and return its exit code."""
    return doctor(arguments, program, describe_model)


def describe_model(name: str, profile: Path | None) -> ModelView:
    """Return a model by its alias, folder, GGUF file or hub id, with the facts that a calibration would start from.

    profile: for its lengths; None for the default lengths.

    Raises ModelError if its config cannot be loaded or S2O can serve no layer, and ProfileError for a bad profile.
    """
    if find_spec("transformers") is None:
        from s2o_runtime.doctor import profile_check

        return profile_check.find_model(name)  # it reports the missing package

    from calibrate.machine import resolve_device
    from calibrate.model.models import load_config, resolve
    from calibrate.model.preflight import make_preflight
    from s2o_runtime.doctor.profile_check import ModelView
    from s2o_runtime.profile import load_profile

    config = load_config(name, random_weights=True)  # without the Hub: the sizes of an alias ship
    device, identity = resolve_device(None)
    lengths = DEFAULT_LENGTHS[identity.kind] if profile is None else load_profile(profile).lengths
    seen = make_preflight(name, config, device=device, lengths=lengths, random_weights=False)
    folder = Path(resolve(name))
    facts = {
        "layers": seen.layers,
        "attention in them": ", ".join(f"{share:.0%} at {length}" for length, share in seen.shares.items()) + " tokens",
        "loaded": seen.loading,
    }
    return ModelView(name, config, folder if folder.is_dir() else None, facts)
