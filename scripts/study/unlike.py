#!/usr/bin/env python3
"""What profiles err by on text unlike that of a calibration.

    python -m scripts.study.unlike PROFILE [PROFILE] [--length 16384] [--settings-of 32768] [--layers 0,1]

The model reads one prompt of each text densely, and every profile's settings of a layer run on what that layer reads,
in plain torch, with scores in the type of the inputs. Numbers are rel_mse, the squared error of a layer's output over
its square. "code" is the built-in text, of files that chose nothing; the others are what nobody calibrates on.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from calibrate.model.capture import layers
from calibrate.model.models import load
from calibrate.prompts.documents import built_in
from s2o_runtime import load_profile
from s2o_runtime.errors import InputError, S2OError
from s2o_runtime.reference.attention import s2o_attention_reference
from s2o_runtime.reference.dense import dense_attention
from scripts.bench.common import BAD_INPUT, OK, Parser, bench_parser, int_list, print_table

NAME = "scripts.study.unlike"
SENTENCE = "The quick brown fox jumps over the lazy dog. "


def parser() -> Parser:
    out, add = bench_parser(NAME, __doc__)
    out.add_argument("profiles", nargs="+", metavar="PROFILE", help="safetensors files of the model")
    add("--model", "demo", "an alias, a local folder, or a hub id", metavar="NAME")
    add("--length", 16384, "tokens of each text", type=int, metavar="N")
    add("--settings-of", None, "the length whose settings run; that of the text by default", type=int, metavar="N")
    add("--layers", None, "layers of full attention, all by default", type=int_list("0,5"), metavar="N,N")
    add("--seed", 1234, type=int, metavar="N")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        study(args)
    except S2OError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return BAD_INPUT
    return OK


@torch.no_grad()
def study(args: argparse.Namespace) -> None:
    """Print a row for each text, with a number for each layer of each profile."""
    profiles = [load_profile(path) for path in args.profiles]
    model = load(args.model, "cpu")
    settings_of = args.settings_of or args.length
    cells, columns = [], []
    for name, ids in texts(model.tokenizer, args.length, args.seed).items():
        errors = []
        for index, captured in enumerate(layers(model, [ids])):
            if args.layers is not None and index > max(args.layers):
                break  # further layers need not run
            if args.layers is None or index in args.layers:
                (prompt,) = captured
                q, k, v = (getattr(prompt, part).float() for part in "qkv")
                dense = dense_attention(q, k, v, **prompt.scoring.arguments())
                for number, profile in enumerate(profiles, 1):
                    config = replace(profile.layer_config(index, settings_of), scores="input")
                    out = s2o_attention_reference(q, k, v, config, **prompt.scoring.arguments()).out
                    errors.append(float((out - dense).square().mean() / dense.square().mean()))
                    columns.append(f"layer {index}, profile {number}")
        cells.append([name, *(f"{error:.1e}" for error in errors)])
        print(" ".join(cells[-1]), file=sys.stderr, flush=True)
    title = f"{args.model}, {args.length} tokens, settings of {settings_of}: rel_mse"
    print_table(title, ["text", *dict.fromkeys(columns)], cells)


def texts(tokenizer: Any, length: int, seed: int) -> dict[str, Tensor]:
    """Token ids of each kind of text, int64 [length].

    Raises:
        InputError: the built-in text has too few tokens.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    (prompt,) = built_in(tokenizer, length, 1, seed)
    code = prompt.ids
    if len(code) < length:
        raise InputError(f"the built-in text has {len(code)} tokens: use --length of at most so many")
    arbitrary = torch.randint(3, int(code.max()) + 1, (length,), generator=generator)

    def tokens(text: str) -> Tensor:
        ids = torch.tensor(tokenizer(text)["input_ids"]).flatten()
        return ids.repeat(-(-length // len(ids)))[:length]

    return {
        "code": code,
        "digits": tokens(" ".join(str(rng.randrange(10**6)) for _ in range(length))),
        "hexadecimal bytes": tokens(" ".join(f"{rng.randrange(256):02x}" for _ in range(length))),
        "random tokens": arbitrary,
        "one sentence, repeated": tokens(SENTENCE),
        "half code, half random tokens": torch.cat([code[: length // 2], arbitrary[length // 2 :]]),
    }


if __name__ == "__main__":
    sys.exit(main())
