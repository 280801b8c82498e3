#!/usr/bin/env python3
"""Calibrate a model with one seed, and ask fresh prompts of other seeds whether what the certificate claims holds.

    python -m scripts.study.claims [--model demo] [--lengths 8192] [--seeds 1] [--fresh 64]

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
from calibrate.machine import resolve_device
from calibrate.proof.recheck import open_profile, verify_certificate
from calibrate.record import read_record
from calibrate.report.sections import describe_certificate, describe_gain, list_claims, show_certificate
from calibrate.tables import Table, open_console, print_lines, print_table
from scripts.bench.common import bench_parser, int_list


def main(argv: Sequence[str] | None = None) -> int:
    parser, add = bench_parser("scripts.study.claims", __doc__)
    add("--model", "demo", "an alias, a local folder, or a hub id", metavar="NAME")
    add("--lengths", (8192,), "tokens", type=int_list("8192,32768"), metavar="N,N")
    add("--seeds", (1,), "of a calibration each", type=int_list("1,2,3"), metavar="N,N")
    add("--fresh", 64, "prompts of each length to ask", type=int, metavar="N")
    args = parser.parse_args(argv)
    console, broken = open_console(), 0
    for seed in args.seeds:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "p.safetensors"
            result = calibrate(args.model, lengths=args.lengths, seed=seed, out=out, progress=False)
            print(f"seed {seed}: calibrated in {time.monotonic() - begun:.0f} s", flush=True)
            print_lines([describe_gain(result.report), *map(str, result.problems)], console)
            if not result.written:
                broken += 1
                continue
            certificate = read_record(result.profile).certificate
            print_lines([describe_certificate(certificate, None), *list_claims(certificate)], console)
            profile = open_profile(args.model, out, resolve_device(None)[0], needs_certificate=True)
            asked = replace(profile, recipe=replace(profile.recipe, num_certify=args.fresh))
            check = verify_certificate(asked, 1000 + seed)
            for part in show_certificate(check):
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
