"""Calibrate the demo model from Python, as `s2o-calibrate` does it, and patch the model with the profile.

    python examples/calibrate_api.py [PROFILE]

Takes about a minute on a CPU. The profile is written to PROFILE (build/api.safetensors by default) after its proof on
held-out prompts; a second call with the same options reuses everything that was measured.
"""

from __future__ import annotations

import sys
from pathlib import Path

from calibrate import calibrate
from s2o_runtime import load_profile


def main(path: Path) -> None:
    result = calibrate(
        "demo", budget_rel_mse=1e-3, lengths=(1024,), num_prompts=2, num_held_out=1, num_certify=9, out=path
    )
    print("written" if result.written else "the proof failed, nothing is written")
    if result.written:
        profile = load_profile(path)
        print(f"{profile.model_name}: {profile.geometry.layers} layers, calibrated at {profile.lengths} tokens")
        # on a transformers model of this architecture: s2o_runtime.patch(model, profile)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("build/api.safetensors"))
