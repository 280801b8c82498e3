#!/usr/bin/env python3
"""Load a profile into its model, prefill a long prompt dense and patched, and let both answer.

    python scripts/run_patched.py PROFILE [--length 32768]

The prompt is standard library source with needles the calibration has not seen; each question is answered by
greedy generation. Times are medians; on a GPU after a warm-up.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from calibrate.models import load
from calibrate.needles import DIGITS, Needle, make_needles
from calibrate.prompts import Prompt, encode, source_text
from calibrate.verify import patched, prefill, time_prefill
from s2o_runtime import S2OError, explain, load_profile
from s2o_runtime.hf import layer_states

NEEDLES = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--model", help="default: the model the profile names")
    parser.add_argument("--length", type=int, help="prompt length (default: the profile's longest)")
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        profile = load_profile(args.profile)
        loaded = load(args.model or profile.model_name, device, resident=True)
        length = args.length or profile.lengths[-1]
        body, needles = document(loaded.tokenizer, length, random.Random(args.seed))
        dense = [answer(loaded, body, needle) for needle in needles]
        with patched(loaded.model, profile):
            sparse = [answer(loaded, body, needle) for needle in needles]
            prefill(loaded.model, torch.tensor(body))
            states = layer_states(loaded.model)
            density = [1.0 if state.last is None else float(state.last.density.mean()) for state in states]
            paths = Counter({(row["path"], row["reason"]): row["calls"] for row in explain(loaded.model)})
        times = time_prefill(loaded, profile, {length: [Prompt(torch.tensor(body))]})[length]
    except S2OError as error:
        print(f"run_patched: {error}", file=sys.stderr)
        return 2

    print(f"{profile.model_name}, {length} tokens, on {torch.cuda.get_device_name() if device == 'cuda' else 'cpu'}")
    for needle, one, other in zip(needles, dense, sparse, strict=True):
        print(f"  code for {needle.word:<10} {needle.code}   dense says {one}   S2O says {other}")
    for name, answers in (("dense", dense), ("S2O", sparse)):
        found = sum(given == needle.code for given, needle in zip(answers, needles, strict=True))
        print(f"{name} found {found} of {len(needles)} codes")
    print("density of each layer: " + ", ".join(f"{share:.2f}" for share in density))
    print(f"prefill: dense {times.dense * 1e3:.1f} ms, S2O {times.patched * 1e3:.1f} ms")
    for (path, reason), _ in sorted(paths.items()):
        print(f"path {path}: {reason}")
    return 0


def document(tokenizer, length: int, rng: random.Random) -> tuple[list[int], list[Needle]]:
    """Source text of `length` tokens with needles spread over it, and the needles."""
    needles = make_needles(NEEDLES, rng)
    facts = [encode(tokenizer, needle.fact) for needle in needles]
    body = source_text(tokenizer, length, rng)
    for index, fact in enumerate(facts):
        place = (index + 1) * length // (NEEDLES + 2)
        body[place : place + len(fact)] = fact
    return body, needles


@torch.no_grad()
def answer(loaded, body: list[int], needle: Needle) -> str:
    """The model's greedy answer to a needle's question, cut to as many characters as a code has digits.

    The question replaces the end of the document, so that the prompt keeps its length.
    """
    question = encode(loaded.tokenizer, needle.question)
    ids = torch.tensor([body[: len(body) - len(question)] + question], device=loaded.model.device)
    out = loaded.model.generate(ids, max_new_tokens=DIGITS, do_sample=False, attention_mask=torch.ones_like(ids))
    return loaded.tokenizer.decode(out[0, ids.shape[1] :]).strip()[:DIGITS]


if __name__ == "__main__":
    sys.exit(main())
