"""Calibrate on your own prompts: a folder of text and Markdown, or a file of JSON lines.

    python examples/own_prompts.py [PROMPTS] [PROFILE]

PROMPTS is this project's documentation by default. Its documents are split three ways, whole groups at a time: prompts
to calibrate, to adjust and to certify on share none. Takes about a minute on a CPU, for the demo model at 1024 tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

from calibrate import calibrate
from calibrate.record import read_record
from s2o_runtime import load_profile

DOCS = Path(__file__).resolve().parent.parent / "docs"


def main(prompts: Path, out: Path) -> None:
    result = calibrate(
        "demo",
        prompts=(prompts,),
        budget_rel_mse=1e-2,
        lengths=(1024,),
        num_prompts=2,
        num_held_out=1,
        num_certify=4,
        trials=2,
        out=out,
        progress=False,
    )
    print("written" if result.written else f"not written: {'; '.join(map(str, result.problems))}")
    if result.written:
        record = read_record(load_profile(out))
        data = record.data
        assert data is not None  # every calibration records its prompts
        numbers = [len(prompts or ()) for prompts in (data.calibration, data.held_out, data.certify)]
        print("{} prompts to calibrate on, {} to adjust on, {} to certify on".format(*numbers))
        print(f"not proven: {'; '.join(record.not_proven or ())}")


if __name__ == "__main__":
    arguments = [Path(argument) for argument in sys.argv[1:]]
    main(*arguments[:2], *(DOCS, Path("build/own-prompts.safetensors"))[len(arguments) :])
