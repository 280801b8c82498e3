"""Take a profile to another GPU: the same thresholds, with tiles tuned for the GPU here.

    python examples/new_gpu.py OUT [PROFILE]

OUT is the file to write, PROFILE by default the demo model's for an H200. Neither the model nor prompts are needed. On
a CPU, where the reference runs any tile, only the device changes. `s2o-profile retile PROFILE` does the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from calibrate.profiles.retile import retile
from calibrate.record import read_record
from s2o_runtime import load_profile
from s2o_runtime.devices import decide_fit, identify

SHIPPED = Path(__file__).resolve().parent.parent / "profiles" / "demo" / "nvidia-h200" / "rel-mse-0.001.safetensors"


def main(out: Path, path: Path = SHIPPED) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    profile = load_profile(path)
    verdict = decide_fit(profile.device, identify(torch.device(device)))
    print(f"as it is: {verdict.reason}")
    if verdict.tiles is None:
        return
    retiled = retile(path, device, out)
    print(f"made on {profile.device}, tiles for {retiled.device}: {out}")
    tuning = read_record(retiled).retiled
    for timed in tuning.timed:
        print(timed)
    same = all(
        old.heads[head].tau == new.heads[head].tau
        for old_bucket, new_bucket in zip(profile.layers, retiled.layers, strict=True)
        for old, new in zip(old_bucket, new_bucket, strict=True)
        for head in range(len(old.heads))
        if new.heads[head].mode == old.heads[head].mode
    )
    print(f"thresholds are {'the same' if same else 'others'}, {tuning.dense_layers} layers became dense")


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit("usage: python examples/new_gpu.py OUT [PROFILE]")
    main(*map(Path, sys.argv[1:]))
