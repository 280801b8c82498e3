"""A proof and a certificate that were checked again, as tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from calibrate.model.estimate import Estimate
from calibrate.options import text
from calibrate.progress import duration
from calibrate.proof.again import Prepared, Recertified, Verified
from calibrate.tables import Table, kept_of
from s2o_runtime.devices import DeviceIdentity


def plan_lines(prepared: Prepared, estimate: Estimate, device: DeviceIdentity, seed: int | None) -> dict[str, str]:
    """What is going to be measured again, and how long that takes, by the lines' names.

    estimate: of that alone. seed: of the certificate's prompts; None where the proof is made again.
    """
    recipe = prepared.recipe
    count = recipe.held_out if seed is None else recipe.num_certify
    source = text(prepared.prompts, ", ") if prepared.prompts else recipe.prompt_source
    phases = ", ".join(f"{name} {duration(seconds)}" for name, seconds in estimate.seconds.items())
    return {
        "takes": f"about {duration(estimate.total)} ({phases})",
        "runs on": str(device),
        "model": recipe.model,
        "layers": prepared.preflight.layers,
        "lengths": ", ".join(map(str, sorted(recipe.all_lengths))),
        "prompts": f"{count} of each length, {source}" + ("" if seed is None else f", of seed {seed}"),
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
