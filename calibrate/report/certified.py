"""What a certificate says, as sentences and tables: the same on the terminal, in the report and on the card."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from calibrate.tables import Number, Table, formatted, kept_of
from s2o_runtime.fields import counted
from s2o_runtime.profile.record import Certificate, CertifiedDomain, CertifiedLayer, CertifiedLength, Record


def statement(certificate: Certificate | None, adjusted_on: int | None) -> str:
    """In one sentence what was shown of means, of all layers at all lengths together.

    Args:
        certificate: of the profile; None if it has none.
        adjusted_on: how many prompts of each length layers were adjusted on; None if that is not recorded.
    """
    lengths = _lengths(certificate)
    if not lengths:
        same = "the same prompts" if adjusted_on is None else f"the same {adjusted_on} prompts of each length"
        return f"Adjusted and checked on {same}; not certified."
    confidence = (certificate and certificate.confidence) or 0.0
    shares = [(one.error_over_limit or 0.0, one.domain) for length in lengths for one in length.domains or ()]
    worst, domain = max(shares, default=(0.0, None), key=lambda share: share[0])
    alone = "" if domain is None else f"; over the prompts of one kind, {domain}, the largest is {worst:.0%} of it"
    return (
        f"Certified on {_range(length.prompts for length in lengths)} prompts of each length, of "
        f"{_range(length.groups for length in lengths)} groups of text ({', '.join(_domains(lengths))}): with "
        f"{confidence:.0%} confidence the mean error of every layer over prompts like these, at each of these lengths, "
        f"is within its limit{alone}."
    )


def in_short(certificate: Certificate | None) -> str:
    """A few words for a table of profiles; "-" without a certificate."""
    lengths = _lengths(certificate)
    if not lengths:
        return "-"
    shares = [length.share for length in lengths if length.share is not None]
    kls = [length.kl for length in lengths if length.kl is not None]
    retrievals = [length.retrieval for length in lengths if length.retrieval is not None]
    found, kept = (sum(getattr(one, name) or 0 for one in retrievals) for name in ("found", "kept"))
    parts = [
        f"{_range(length.prompts for length in lengths)} prompts",
        "means within limits",
        f"KL within {max(kls):.1e} of {_at_least(min(shares))}" if kls and shares else "",
        f"needles {kept} of {found}" if found else "",
    ]
    return ", ".join(part for part in parts if part)


def adjusted_on(record: Record) -> int | None:
    """How many prompts of each length a profile's layers were adjusted on; None if that is not recorded."""
    lengths = [prompt.length for prompt in (record.data and record.data.held_out) or ()]
    return min((lengths.count(length) for length in set(lengths)), default=None)


def sentences(certificate: Certificate | None) -> list[str]:
    """What is certified of prompts at each length, and how."""
    confidence = (certificate and certificate.confidence) or 0.0
    method = [f"how: {certificate.method}"] if certificate and certificate.method else []
    layers = [layer for length in _lengths(certificate) for layer in length.layers or ()]
    dense = sum(layer.spent == 0 for layer in layers)
    less = sum(layer.spent is not None for layer in layers) - dense
    changed = f"{counted(less, 'layer')} got less of the budget than was adjusted, and {dense} became dense"
    return (
        [_of_length(length, confidence) for length in _lengths(certificate)] + [changed] * bool(less + dense) + method
    )


def _of_length(length: CertifiedLength, confidence: float) -> str:
    """The joint claim about prompts, and what these prompts had."""
    if length.share is None:
        text = "every layer is dense"
    else:
        times = "" if length.error_over_limit == 1 else f"{formatted(length.error_over_limit, '.2f')} times "
        text = (
            f"with {confidence:.0%} confidence at least {_at_least(length.share)} of prompts like these keep every "
            f"layer within {times}its limit, over all rows and over those that answer, "
            f"and the KL within {formatted(length.kl, '.1e')} nats, together"
        )
    noise = "" if length.noise_floor is None else f" (two dense implementations: {length.noise_floor:.1e})"
    text += f"; these had a mean KL of {formatted(length.mean_kl, '.1e')}{noise}"
    retrieval = length.retrieval
    if retrieval is None or not retrieval.found:
        return f"{length.length} tokens: {text}; retrieval not proven"
    return (
        f"{length.length} tokens: {text}; {retrieval.kept} of {retrieval.found} needles kept "
        f"({_at_least(retrieval.low or 0)} to {retrieval.high or 0:.0%})"
    )


def _at_least(share: float) -> str:
    """A lower bound in percent, which no rounding makes larger."""
    return f"{math.floor(1000 * share + 1e-9) / 10:.3g}%"


def tables(certificate: Certificate | None) -> list[Table]:
    """What is certified of each length, both units of a budget in mse, and each kind of text; none without a
    certificate."""
    lengths = _lengths(certificate)
    if not lengths:
        return []
    units = [_units_table(lengths)] if any(layer.rel_mse is not None for layer in lengths[0].layers or ()) else []
    return [_bounds_table(lengths), *units, _domain_table(lengths)]


def _bounds_table(lengths: Sequence[CertifiedLength]) -> Table:
    """One row a length: the layer whose bound is nearest to its limit, and what prompts keep together."""
    columns: dict[str, Callable[[CertifiedLength], str]] = {
        "length": lambda length: formatted(length.length, "d"),
        "prompts": lambda length: formatted(length.prompts, "d"),
        "groups": lambda length: formatted(length.groups, "d"),
        "less": lambda length: formatted(sum(one.spent is not None for one in length.layers or ()), "d"),
        "mean /\nlimit": lambda length: _share(_over_limit(one, one.mean) for one in _sparse(length)),
        "bound /\nlimit": lambda length: _share(_over_limit(one, one.bound) for one in _sparse(length)),
        "of prompts": lambda length: "-" if length.share is None else _at_least(length.share),
        "error /\nlimit": lambda length: formatted(length.error_over_limit, ".2f"),
        "KL": lambda length: formatted(length.kl, ".1e"),
        "noise": lambda length: formatted(length.noise_floor, ".1e"),
        "least\ntop-1": lambda length: formatted(length.top1, ".2%"),
        "kept": lambda length: (
            "-" if length.retrieval is None else kept_of(length.retrieval.kept or 0, length.retrieval.found or 0)
        ),
    }
    return Table.of(lengths, columns, "certified")


def _sparse(length: CertifiedLength) -> list[CertifiedLayer]:
    """The layers that are not dense."""
    return [layer for layer in length.layers or () if layer.density != 1.0]


def _units_table(lengths: Sequence[CertifiedLength]) -> Table:
    """One row a length: the largest bounds of its layers in both units, and how many limits the ceiling is."""

    def largest(bounds: Iterable[float | None]) -> str:
        return formatted(max((bound for bound in bounds if bound is not None), default=None), ".2e")

    def by_ceiling(length: CertifiedLength) -> str:
        limits = [layer.binds for layer in length.layers or ()]
        return f"{limits.count('rel_mse')} of {len(limits)} layers" if any(limits) else "-"

    columns: dict[str, Callable[[CertifiedLength], str]] = {
        "length": lambda length: formatted(length.length, "d"),
        "largest bound, mse": lambda length: largest(layer.bound for layer in length.layers or ()),
        "as rel_mse": lambda length: largest(layer.rel_bound for layer in length.layers or ()),
        "the ceiling binds in": by_ceiling,
    }
    return Table.of(lengths, columns, "in both units")


def _domain_table(lengths: Sequence[CertifiedLength]) -> Table:
    """One row for each kind of text: its mean error over the limit at each length, and the largest of all else."""
    texts: dict[str, dict[int | None, CertifiedDomain]] = {}
    for length in lengths:
        for domain in length.domains or ():
            texts.setdefault(domain.domain or "-", {})[length.length] = domain

    def largest(text: str, name: str, style: str) -> str:
        numbers = [getattr(domain, name) for domain in texts[text].values()]
        return formatted(max((number for number in numbers if number is not None), default=None), style)

    def error_at(length: int | None) -> Callable[[str], str]:
        return lambda text: formatted(getattr(texts[text].get(length), "error_over_limit", None), ".0%")

    columns: dict[str, Callable[[str], str]] = {
        "text": str,
        "prompts": lambda text: _range(domain.prompts for domain in texts[text].values()),
        "groups": lambda text: _range(domain.groups for domain in texts[text].values()),
        **{f"error / limit\nat {length.length}": error_at(length.length) for length in lengths},
        "rows that\nanswer": lambda text: largest(text, "answer_over_limit", ".0%"),
        "mean KL": lambda text: largest(text, "kl", ".1e"),
    }
    return Table.of(sorted(texts), columns, "by kind of text", align="lr")


def _lengths(certificate: Certificate | None) -> tuple[CertifiedLength, ...]:
    return (certificate and certificate.lengths) or ()


def _domains(lengths: Iterable[CertifiedLength]) -> list[str]:
    return sorted({one.domain for length in lengths for one in length.domains or () if one.domain})


def _over_limit(layer: CertifiedLayer, bound: float | None) -> float | None:
    return None if bound is None or not layer.limit else bound / layer.limit


def _share(shares: Iterable[float | None]) -> str:
    measured = [share for share in shares if share is not None]
    return _percent(max(measured)) if measured else "-"


def _percent(share: float) -> Number:
    return Number(f"{share:.0%}", share)


def _range(counts: Iterable[int | None]) -> str:
    measured = sorted({count for count in counts if count})
    return "-" if not measured else str(measured[0]) if len(measured) == 1 else f"{measured[0]} to {measured[-1]}"
