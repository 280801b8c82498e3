#!/usr/bin/env python3
"""What do profiles of one model do on the same fresh prompts: attention's time, errors, KL and needles?

    python -m scripts.bench.profiles PROFILE [PROFILE ...] [--model demo] [--lengths 8192,32768] [--num-prompts 4]
        [--seed 7] [--device cuda] [--out FILE.json]

Times are those of attention on the first prompt, summed over the layers: medians with a cold L2 cache, in turns with
cuDNN's dense attention on the same tensors. The prompts are of built-in text and drawn with a seed of their own. On
another GPU than a profile's, it runs as it would be deployed there: with the tiles that its fit to this GPU gives.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch

from calibrate.model.models import load
from calibrate.prompts.prompts import load_prompts
from calibrate.proof.verify import LengthProof, prove
from calibrate.recipe import Recipe
from s2o_runtime.errors import InputError
from s2o_runtime.identity import fingerprint_mismatch
from s2o_runtime.profile import load_profile
from s2o_runtime.profile.device_fit import fitted
from scripts.bench.common import (
    Parser,
    add_device,
    bench_parser,
    check_device,
    int_list,
    machine,
    print_table,
    run_command,
)
from scripts.bench.schema import ProfileRow, ProfilesFile, write

NAME = "scripts.bench.profiles"


def parser() -> Parser:
    out, add = bench_parser(NAME, __doc__)
    out.add_argument("profiles", type=Path, nargs="+", metavar="PROFILE", help="profiles of one model")
    add("--model", "demo", "an alias, a local folder, or a hub id", metavar="NAME")
    add("--lengths", "8192,32768", "prompt lengths", type=int_list("8192,32768"), metavar="N,N")
    add("--num-prompts", 4, "fresh prompts of each length", type=int, metavar="N")
    add("--seed", 7, "what draws them; not the profiles'", type=int, metavar="N")
    add_device(add)
    add("--out", Path("build/bench-profiles.json"), type=Path, metavar="FILE")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run_command(NAME, args.out, lambda: bench(args), "a shorter --lengths")


def bench(args: argparse.Namespace) -> None:
    """Prove every profile on the same prompts, print a row for each length, and write them to --out."""
    check_device(args)
    fresh = Recipe.of(
        {
            "model": args.model,
            "lengths": args.lengths,
            "check_lengths": (),
            "num_held_out": args.num_prompts,
            "num_certify": 0,
            "seed": args.seed,
            "device": args.device,
            "out": args.out,
        }
    )
    device = torch.device(args.device)
    opened = {}
    for path in args.profiles:
        opened[path], rejected = fitted(load_profile(path), device)
        if rejected is not None:
            raise InputError(f"{path} cannot run here: {rejected}")
    loaded = load(args.model, args.device)
    for path, profile in opened.items():
        difference = loaded.geometry.difference(profile.geometry) or fingerprint_mismatch(
            loaded.fingerprint, profile.fingerprint
        )
        if difference:
            raise InputError(f"{path} is not of {args.model}, which differs: {difference}")
    prompts = load_prompts(fresh, loaded.tokenizer).held_out
    file = ProfilesFile(
        **machine(device), model=args.model, seed=args.seed, num_prompts=args.num_prompts, rows=[]
    )  # fmt: skip
    for path, profile in opened.items():
        _, proofs = prove(loaded, prompts, profile)
        file.rows.extend(row_of(path.name, length, proof) for length, proof in sorted(proofs.items()))
        write(args.out, file)
    print_table("profiles on the same fresh prompts", ProfileRow.COLUMNS, (row.cells() for row in file.rows))


def row_of(profile: str, length: int, proof: LengthProof) -> ProfileRow:
    """What one profile did at one length."""
    times = [(layer.seconds, layer.dense_seconds) for layer in proof.layers]
    timed = all(seconds is not None and dense is not None for seconds, dense in times)
    return ProfileRow(
        profile=profile,
        length=length,
        density=fmean(layer.density for layer in proof.layers),
        seconds=sum(seconds or 0.0 for seconds, _ in times) if timed else None,
        dense_seconds=sum(dense or 0.0 for _, dense in times) if timed else None,
        mean_rel_mse=fmean(layer.rel_mse for layer in proof.layers),
        largest_rel_mse=max(layer.rel_mse for layer in proof.layers),
        kl=proof.kl,
        top1=proof.top1,
        needles=list(proof.needles) if proof.needles else None,
    )


if __name__ == "__main__":
    sys.exit(main())
