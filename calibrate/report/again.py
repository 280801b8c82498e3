"""A proof and a certificate that were checked again, as tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean

from calibrate.model.preflight import Preflight
from calibrate.progress import duration
from calibrate.proof.again import Recertified, Verified
from calibrate.recipe import Recipe
from calibrate.tables import Table, kept_of


def plan_lines(recipe: Recipe, preflight: Preflight, seconds: Mapping[str, float], prompts: str) -> dict[str, str]:
    """What is going to be measured again, and how long its phases take at most; prompts: how many of each length."""
    phases = ", ".join(f"{name} {duration(taken)}" for name, taken in seconds.items())
    return {
        "takes": f"at most about {duration(sum(seconds.values()))} ({phases})",
        "model": recipe.model,
        "layers": preflight.layers,
        "lengths": ", ".join(map(str, sorted(recipe.all_lengths))),
        "prompts": prompts,
    }


def proof_parts(proof: Verified) -> Iterator[Table | str]:
    """What the prompts that layers were adjusted on say here: a row for each length."""
    names = ("length", "largest error", "rel_mse", "error / limit", "density", "needles", "KL")
    rows = [
        (
            str(length["length"]),
            f"{max(layer['error'] for layer in length['layers']):.2e}",
            f"{max(layer['rel_mse'] for layer in length['layers']):.2e}",
            f"{max(layer['error'] / layer['limit'] if layer['limit'] else 0.0 for layer in length['layers']):.0%}",
            f"{fmean(layer['density'] for layer in length['layers']):.3f}",
            "-" if length["needles"] is None else kept_of(*length["needles"]),
            f"{length['kl']:.1e}",
        )
        for length in proof.lengths
    ]
    yield Table(names, rows, "proven here")
    if not proof.same_prompts:
        yield "the prompts are not those the profile was proven on"


def certificate_parts(check: Recertified) -> Iterator[Table | str]:
    """What fresh prompts say of a certificate: a row for each length."""
    names = ("length", "prompts", "groups", "mean / limit", "broken", "outside", "mean KL", "kept")
    rows = [
        (
            str(length.length),
            str(length.prompts),
            str(length.groups),
            f"{length.means:.0%}",
            str(length.broken),
            f"{length.above} of {length.groups}",
            f"{length.mean_kl:.1e}",
            "-" if length.retrieval is None else f"{length.retrieval.kept} of {length.retrieval.found}",
        )
        for length in check.lengths
    ]
    yield Table(names, rows, "the certificate on fresh prompts")
    yield (
        "mean / limit: of the layer that is nearest to its limit; broken: layers whose mean is over it by more than "
        "chance explains, at 5% for all together; outside: groups of text with a prompt outside the joint limit"
    )
