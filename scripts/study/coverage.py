#!/usr/bin/env python3
"""Count how often what is certified of means holds on made-up losses; no model, no GPU.

    python -m scripts.study.coverage [--rounds 2000] > docs/results/coverage-bounds.txt
    python -m scripts.study.coverage --answers [--rounds 1500] > docs/results/coverage-answers.txt

A round draws the losses of 24 cells (layers at lengths) on texts of four kinds that differ five times in their means,
and bounds their means as `calibrate.proof` does. All cells have a mean exactly at their limit, which is where the claim
is wrong most often. The numbers are how often no cell's bound is below its mean, of 95%. The column "20 of 10 kinds"
is the default, two texts of each kind, with 28 layers at three lengths.

With --answers the claim is that of a budget of answers: a text has one KL, which counts with at most ten times the
budget, and the mean of that is exactly the budget at each of three lengths. "each": how often the bound at one length
is not below it; "all": how often at all three at once, of 95%.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from calibrate.proof.bounds import SPEND_FRACTIONS, bound_mean, compute_attempt_confidence
from calibrate.proof.certify_answers import CAP, SKEW
from calibrate.recipe import Budget, Recipe

Draw = Callable[[Generator, tuple[int, ...]], NDArray[np.float64]]
LAYERS = 8
LENGTHS = (8192, 16384, 32768)
RECIPE = Recipe("made-up", Budget("rel_mse", 1.0), LENGTHS, Path("p"), check_lengths=())
KINDS = np.array([0.2, 0.8, 1.0, 2.0])  # means of the kinds; their own is 1
DESIGNS = (12, 4, LAYERS), (32, 4, LAYERS), (128, 4, LAYERS), (20, 10, 28)  # texts, kinds, layers; last the default
ANSWER_TEXTS = 20, 40, 60  # of ten kinds; the default first
ALIKE = 0.7  # of the variance of a text's log loss is common to all cells


def lognormal(spread: float) -> Draw:
    """Losses whose logarithm has this deviation, mean 1."""

    def draw(rng: Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
        common = rng.standard_normal((*shape[:-1], 1))
        own = rng.standard_normal(shape)
        logarithms = ALIKE**0.5 * common + (1 - ALIKE) ** 0.5 * own
        return np.asarray(np.exp(spread * logarithms - spread**2 / 2))

    return draw


def unequal(rng: Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Lognormal losses that vary much in the kind with the largest mean of four, and little in the others."""
    spreads = np.resize([0.1, 0.1, 0.1, 0.5], shape[-2])[:, None]
    logarithms = np.log(lognormal(1.0)(rng, shape))
    return np.asarray(np.exp(spreads * logarithms + (spreads - spreads**2) / 2))


def outliers(share: float, times: float) -> Draw:
    """A share of texts with so many times the loss of the others in every cell, mean 1."""

    def draw(rng: Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
        out = rng.random((*shape[:-1], 1)) < share
        losses = np.where(out, times, 1.0) * lognormal(0.2)(rng, shape)
        return np.asarray(losses / (1 + share * (times - 1)))

    return draw


def pareto(rng: Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Losses with an infinite variance, one for all cells, mean 1."""
    losses = (1 + rng.pareto(2.0, (*shape[:-1], 1))) / 2
    return np.broadcast_to(losses, shape)


SHAPES: Mapping[str, Draw] = {
    "lognormal, spread 0.2": lognormal(0.2),
    "lognormal, spread 0.5": lognormal(0.5),
    "lognormal, spread 1": lognormal(1.0),
    "lognormal, spread 0.5 in one kind": unequal,
    "5 of 100 ten times as large": outliers(0.05, 10),
    "3 of 100 thirty times as large": outliers(0.03, 30),
    "1 of 100 a hundred times as large": outliers(0.01, 100),
    "Pareto, 2": pareto,
}


def make_kinds(texts: int, kinds: int) -> tuple[list[str], NDArray[np.float64]]:
    """Return the kind of each text, and the kinds' means, whose mean is 1."""
    means = np.resize(KINDS, kinds)
    return [*map(str, range(kinds))] * (texts // kinds), means / means.mean()


def covered(draw: Draw, texts: int, rounds: int, kinds: int = 4, layers: int = LAYERS, seed: int = 0) -> float:
    """Return how often the means of all cells are within their bounds with so many texts of each length."""
    rng = np.random.default_rng(seed)
    cells = layers * len(LENGTHS)
    names, means_of_kinds = make_kinds(texts, kinds)
    confidence = compute_attempt_confidence(SPEND_FRACTIONS[0], RECIPE, layers)
    held = 0
    for _ in range(rounds):
        losses = draw(rng, (texts // kinds, kinds, cells)) * means_of_kinds[:, None]
        losses = losses.reshape(texts, cells)
        held += all(bound_mean(losses[:, cell].tolist(), names, confidence) >= 1 for cell in range(cells))
    return held / rounds


def cover_answers(draw: Draw, texts: int, rounds: int, kinds: int = 10, seed: int = 0) -> tuple[float, float]:
    """Return how often the bound of the answers' mean KL holds, with so many texts: at a length, and at all of them."""
    rng = np.random.default_rng(seed)
    names, means_of_kinds = make_kinds(texts, kinds)
    confidence = compute_attempt_confidence(SPEND_FRACTIONS[0], RECIPE, SKEW)
    many = draw(rng, (200_000 // kinds, kinds, 1))[..., 0] * means_of_kinds
    scale = 1.0
    for _ in range(20):  # until the mean of what is capped is the budget, 1
        scale /= float(np.minimum(scale * many, CAP).mean())
    held = np.empty((rounds, len(LENGTHS)), bool)
    for at in np.ndindex(held.shape):
        few = draw(rng, (texts // kinds, kinds, 1))[..., 0] * means_of_kinds
        kls = np.minimum(scale * few, CAP)
        held[at] = bound_mean(kls.ravel().tolist(), names, confidence) >= 1
    return float(held.mean()), float(held.all(1).mean())


def grouped(rounds: int, seed: int = 0) -> tuple[float, float]:
    """Return how often means hold where eight prompts are of two novels a kind: counted by prompt, and by group."""
    rng = np.random.default_rng(seed)
    kinds = [*"abcd"] * 8
    confidence = compute_attempt_confidence(SPEND_FRACTIONS[0], RECIPE, LAYERS)
    by_prompt = by_group = 0
    for _ in range(rounds):
        groups = rng.lognormal(-0.08, 0.4, (2, 4))
        prompts = np.repeat(groups, 4, 0) * rng.lognormal(-0.005, 0.1, (8, 4)) * KINDS
        by_prompt += bound_mean(prompts.ravel().tolist(), kinds, confidence) >= 1
        means = prompts.reshape(2, 4, 4).mean(1)
        by_group += bound_mean(means.ravel().tolist(), [*"abcd"] * 2, confidence) >= 1
    return by_prompt / rounds, by_group / rounds


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--answers", action="store_true")
    options = parser.parse_args(argv)
    rounds = options.rounds
    print(__doc__, flush=True)
    if options.answers:
        print(f"{rounds} rounds".ljust(36) + "".join(f"{texts:>3} of ten:  each    all   " for texts in ANSWER_TEXTS))
        for name, draw in SHAPES.items():
            held = [cover_answers(draw, texts, rounds) for texts in ANSWER_TEXTS]
            print(f"{name:<36}" + "".join(f"{each:>16.1%}{every:>7.1%}   " for each, every in held), flush=True)
        return 0
    titles = [f"{texts} of {kinds} kinds" for texts, kinds, _ in DESIGNS]
    print(f"{rounds} rounds".ljust(36) + "".join(title.rjust(16) for title in titles))
    for name, draw in SHAPES.items():
        print(f"{name:<36}", end="")
        for texts, kinds, layers in DESIGNS:
            print(f"{covered(draw, texts, rounds, kinds, layers):>16.1%}", end="", flush=True)
        print()
    by_prompt, by_group = grouped(rounds)
    print("\nmeans with prompts of two novels a kind, spread 0.4 between novels and 0.1 within, 32 prompts")
    print(f"counted by prompt {by_prompt:.1%}, by group {by_group:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
