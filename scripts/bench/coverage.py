#!/usr/bin/env python3
"""Does a certificate hold on prompts that had no part in it? A certified profile on fresh prompts, by kind of text.

    python -m scripts.bench.coverage PROFILE [--model demo] [--domains code,prose,chat,chinese] [--num-prompts 16]
        [--lengths 8192] [--seed 1] [--prompts FILE,FOLDER] [--device cpu] [--out FILE.json]

The fresh prompts are drawn with another seed from documents that neither calibrated nor adjusted the profile; built-in
text has more of these than a certificate uses, but some of them may have certified it. With --prompts they are yours.
What is over a bound is counted for each kind of text, and for all together: the bounds are for the mixture that the
profile was certified on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch

from calibrate.options import text
from calibrate.prompts.prompts import Prompt
from calibrate.proof.recertify import bounds_and_errors, fresh_prompts
from calibrate.proof.reprove import ToProve, to_prove
from calibrate.proof.sample import LengthSample, sample
from calibrate.recipe import DOMAINS
from s2o_runtime.errors import InputError
from s2o_runtime.profile import load_profile
from s2o_runtime.profile.record import CertifiedLength
from scripts.bench.common import (
    Parser,
    add_device,
    bench_parser,
    check_device,
    check_least,
    int_list,
    machine,
    print_table,
    run_command,
)
from scripts.bench.schema import CoverageCounts, CoverageFile, CoverageLayer, CoverageRow, write

NAME = "scripts.bench.coverage"
ALL = "all"  # the row of all kinds of text together


def parser() -> Parser:
    out, add = bench_parser(NAME, __doc__)
    out.add_argument("profile", type=Path, help="a certified profile")
    add("--model", "demo", "an alias, a local folder, or a hub id", metavar="NAME")
    add("--domains", ",".join(DOMAINS), "kinds of built-in text", metavar="NAME,NAME")
    add("--prompts", None, "files and folders instead of built-in text", metavar="FILE,FOLDER")
    out.add_argument("--lengths", type=int_list("8192"), metavar="N,N", help="certified lengths (default all of them)")
    add("--num-prompts", 16, "fresh prompts of each kind and length", type=int, metavar="N")
    add("--seed", 1, "what draws them; not the profile's", type=int, metavar="N")
    add_device(add)
    add("--out", Path("build/bench-coverage.json"), type=Path, metavar="FILE")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run_command(NAME, args.out, lambda: bench(args), "a shorter profile")


def bench(args: argparse.Namespace) -> None:
    """Measure every certified length on every kind of text, print a row for each, and write them to --out."""
    check_device(args)
    check_least(args, 2, "num_prompts")
    certificate = load_profile(args.profile).record.certificate
    certified = {
        entry.length: entry
        for entry in (certificate and certificate.lengths) or ()
        if entry.length is not None and entry.layers
    }
    if not certified:
        raise InputError(f"{args.profile} is not certified: calibrate with --num-certify")
    if args.lengths is not None:
        if unknown := set(args.lengths) - set(certified):
            raise InputError(f"{min(unknown)} is not certified: choose from --lengths {text(tuple(certified))}")
        certified = {length: certified[length] for length in args.lengths}
    opened = to_prove(args.model, args.profile, args.device)
    if args.seed == opened.recipe.seed:
        raise InputError(f"seed {args.seed} drew the prompts of {args.profile}: use another --seed")
    file = CoverageFile(
        **machine(torch.device(args.device)),
        model=args.model,
        profile=args.profile.name,
        budget=f"{opened.recipe.budget.kind} {opened.recipe.budget.value:g}",
        seed=args.seed,
        num_prompts=args.num_prompts,
        prompts=args.prompts,
        rows=[],
    )
    for length, entry in certified.items():
        samples = {
            domain: sample(opened.loaded, length, prompts, opened.profile, chunk=opened.recipe.chunk)[1]
            for domain, prompts in by_domain(opened, length, args).items()
        }
        file.rows.extend(rows_of(opened, entry, samples))
        write(args.out, file)
    print_table("fresh prompts against the certificate", CoverageRow.COLUMNS, (row.cells() for row in file.rows))


def by_domain(opened: ToProve, length: int, args: argparse.Namespace) -> dict[str, list[Prompt]]:
    """The fresh prompts of one length by kind of text."""
    drawn = replace(opened.recipe, seed=args.seed, num_certify=args.num_prompts, lengths=(length,), check_lengths=())
    if args.prompts is not None:
        fresh = fresh_prompts(opened, drawn, tuple(map(Path, args.prompts.split(","))))[length]
    else:
        recipes = [replace(drawn, domains=(name,), prompts=None).validate() for name in args.domains.split(",")]
        fresh = [prompt for recipe in recipes for prompt in fresh_prompts(opened, recipe, None)[length]]
    prompts: dict[str, list[Prompt]] = {}
    for prompt in fresh:
        prompts.setdefault(prompt.domain, []).append(prompt)
    return prompts


def rows_of(opened: ToProve, certified: CertifiedLength, samples: dict[str, LengthSample]) -> list[CoverageRow]:
    """A row for each kind of text, and if there are several one for all together."""
    rows = [row_of(opened, certified, domain, [seen]) for domain, seen in samples.items()]
    return rows if len(rows) < 2 else [*rows, row_of(opened, certified, ALL, list(samples.values()))]


def row_of(opened: ToProve, certified: CertifiedLength, domain: str, samples: list[LengthSample]) -> CoverageRow:
    """What some prompts of one length show beside the certificate."""
    assert certified.length is not None
    budget, layers, counts = opened.recipe.budget, list[CoverageLayer](), dict[str, CoverageCounts]()
    for index, entry in enumerate(certified.layers or ()):
        config = opened.profile.layer_config(index, certified.length)
        if config.is_dense:
            continue
        of_parts: dict[str, tuple[float, list[float]]] = {}
        for seen in samples:
            for rows, bound, errors in bounds_and_errors(entry, seen.layers[index], budget):
                of_parts.setdefault(rows, (bound, []))[1].extend(errors)
        for rows, (bound, errors) in of_parts.items():
            old = counts.get(rows, CoverageCounts(rows, 0, 0, 0, 0))
            counts[rows] = CoverageCounts(
                rows,
                old.layers + 1,
                old.means_above + (fmean(errors) > bound),
                old.cells + len(errors),
                old.cells_above + sum(error > bound for error in errors),
            )
            if rows == "all rows":
                kept = [float(f"{error:.3g}") for error in errors] if domain != ALL else []
                layers.append(CoverageLayer(index, fmean(errors), bound, entry.limit, max(errors), kept))
    agreements = [agreement for seen in samples for agreement in seen.agreements]
    kls = [max(0.0, agreement.kl) for agreement in agreements]
    kl_bound = certified.kl.value if certified.kl else None
    return CoverageRow(
        length=certified.length,
        domain=domain,
        prompts=len(kls),
        counts=list(counts.values()),
        layers=layers,
        mean_kl=fmean(kls),
        kl_bound=kl_bound,
        kl_above=0 if kl_bound is None else sum(kl > kl_bound for kl in kls),
        top1=fmean(agreement.top1 for agreement in agreements),
        needles_found=sum(agreement.found for agreement in agreements),
        needles_kept=sum(agreement.kept for agreement in agreements),
    )


if __name__ == "__main__":
    sys.exit(main())
