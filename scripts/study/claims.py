#!/usr/bin/env python3
"""Calibrate a model with one seed, and ask fresh prompts of other seeds whether what the certificate claims holds.

    python -m scripts.study.claims [--model demo] [--lengths 8192] [--seeds 1] [--fresh 64] [--per-prompt]

Prints the claims, what fresh prompts say of each with how likely chance is to give that, and how much faster than dense
attention was. Exit code 1 if a claim is broken.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from calibrate import calibrate
from calibrate.machine import named_device
from calibrate.proof.recheck import opened, recertified
from calibrate.record import read_record
from calibrate.report.sections import certificate_parts, gain, sentences, statement
from calibrate.tables import Table, print_lines, print_table, terminal
from scripts.bench.common import bench_parser, int_list


def main(argv: Sequence[str] | None = None) -> int:
    parser, add = bench_parser("scripts.study.claims", __doc__)
    add("--model", "demo", "an alias, a local folder, or a hub id", metavar="NAME")
    add("--lengths", (8192,), "tokens", type=int_list("8192,32768"), metavar="N,N")
    add("--seeds", (1,), "of a calibration each", type=int_list("1,2,3"), metavar="N,N")
    add("--fresh", 64, "prompts of each length to ask", type=int, metavar="N")
    parser.add_argument("--per-prompt", action="store_true", help="hold single prompts to the limits")
    args = parser.parse_args(argv)
    console, broken = terminal(), 0
    for seed in args.seeds:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "p.safetensors"
            result = calibrate(
                args.model, lengths=args.lengths, seed=seed, per_prompt=args.per_prompt, out=out, progress=False
            )
            print(f"seed {seed}: calibrated in {time.monotonic() - begun:.0f} s", flush=True)
            print_lines([gain(result.report), *map(str, result.problems)], console)
            if not result.written:
                broken += 1
                continue
            certificate = read_record(result.profile).certificate
            print_lines([statement(certificate, None), *sentences(certificate)], console)
            profile = opened(args.model, out, named_device(None)[0], needs_certificate=True)
            asked = replace(profile, recipe=replace(profile.recipe, num_certify=args.fresh))
            check = recertified(asked, 1000 + seed)
            for part in certificate_parts(check):
                print_table(part, console) if isinstance(part, Table) else print_lines([part], console)
            print_lines(
                [f"chance of what is outside: {one.chance:.1%} at {one.length}" for one in check.lengths], console
            )
            print_lines([f"broken: {problem}" for problem in check.problems], console)
            broken += bool(check.problems)
            print(f"seed {seed}: {time.monotonic() - begun:.0f} s", flush=True)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
