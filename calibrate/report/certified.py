"""What a certificate says, as sentences and tables: the same on the terminal, in the report and on the card."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from calibrate.tables import Number, Table, formatted, kept_of
from s2o_runtime.fields import counted
from s2o_runtime.profile.record import Certificate, CertifiedDomain, CertifiedLayer, CertifiedLength, NextPrompt, Record

STATED = "last eighth and continued are information: they are stated as shares of the limit and not held to it"
MOST = 100.0  # times its limit: a bound above it says only that there were too few prompts


def statement(certificate: Certificate | None, adjusted_on: int | None) -> str:
    """In one sentence what was shown of means: of each layer by itself, under the assumption of the bound.

    Args:
        certificate: Of the profile; None if it has none.
        adjusted_on: How many prompts of each length layers were adjusted on; None if that is not recorded.
    """
    lengths = _lengths(certificate)
    if not lengths:
        same = "the same prompts" if adjusted_on is None else f"the same {adjusted_on} prompts of each length"
        return f"Adjusted and checked on {same}; not certified."
    domains = sorted({one.domain for length in lengths for one in length.domains or () if one.domain})
    text = f" ({', '.join(domains)})" if domains else ""
    confidence = (certificate and certificate.confidence) or 0.0
    changed = any(_changed(length) for length in lengths)
    chose = "only how much less of its budget a layer got" if changed else "nothing"
    shares = [(one.error_over_limit or 0.0, one.domain) for length in lengths for one in length.domains or ()]
    worst, kind = max(shares, default=(0.0, None), key=lambda share: share[0])
    alone = f"; over {kind} alone it is up to {worst:.0%}" if kind and len(domains) > 1 else ""
    return (
        f"Certified on {_range(length.prompts for length in lengths)} prompts of each length that chose {chose}{text}: "
        f"with {confidence:.0%} confidence for each layer by itself, its mean error over prompts like these is at "
        f"most {_largest(lengths):.0%} of its limit{alone}."
    )


def in_short(certificate: Certificate | None) -> str:
    """A few words for a table of profiles; "-" without a certificate."""
    lengths = _lengths(certificate)
    if not lengths:
        return "-"
    kls = [length.kl.value for length in lengths if length.kl is not None and length.kl.value is not None]
    retrievals = [length.retrieval for length in lengths if length.retrieval is not None]
    found, kept = (sum(getattr(one, name) or 0 for one in retrievals) for name in ("found", "kept"))
    parts = [
        f"{_range(length.prompts for length in lengths)} prompts",
        f"bounds at most {_largest(lengths):.0%} of limits",
        f"KL below {max(kls):.1e}" if kls else "",
        f"needles {kept} of {found}" if found else "",
    ]
    return ", ".join(part for part in parts if part)


def adjusted_on(record: Record) -> int | None:
    """How many prompts of each length a profile's layers were adjusted on; None if that is not recorded."""
    lengths = [prompt.length for prompt in (record.data and record.data.held_out) or ()]
    return min((lengths.count(length) for length in set(lengths)), default=None)


def sentences(certificate: Certificate | None) -> list[str]:
    """What is certified of the next prompt at each length, or why nothing is, and what the certificate changed."""
    lengths = _lengths(certificate)
    layers = [layer for length in lengths for layer in length.layers or ()]
    dense = sum(layer.rung == 0 for layer in layers)
    less = sum(layer.rung is not None for layer in layers) - dense
    looks = f"{len(layers) - less - dense} of {len(layers)} bounds were within their limits at the first look"
    changed = f"{counted(less, 'layer')} got less of their budget and {dense} became dense" if less or dense else ""
    first = [", ".join(filter(None, (looks, changed)))] if layers else []
    method = [f"how: {certificate.method}"] if certificate and certificate.method else []
    return [_of_length(length) for length in lengths] + first + method


def _of_length(length: CertifiedLength) -> str:
    """Of the next prompt, unless these prompts chose a layer's config: then only what these prompts had."""
    noise = "" if length.noise_floor is None else f" (two dense implementations: {length.noise_floor:.1e})"
    kl = f"{_value(length.kl, '.1e')} nats{noise}{_mean_kl(length)}"
    top1 = f"at least {_value(length.top1, '.2%')} of top-1 tokens"
    error = f"{_value(length.error_over_limit, '.2f')} times its limit"
    probability = (length.kl and length.kl.probability) or 0.0
    if changed := _changed(length):
        within = round(probability * ((length.prompts or 0) + 1))
        text = (
            f"{length.length} tokens: these prompts chose how much less of the budget {counted(changed, 'layer')} got, "
            f"so nothing is certified of the next prompt; of these, {within} had, each by itself, a KL of at most "
            f"{kl}, {top1}, the error of every layer at most {error}"
        )
    else:
        text = (
            f"{length.length} tokens: with a probability of at least {probability:.0%} each by itself, the next prompt "
            f"like these keeps the KL below {kl}, {top1}, the error of every layer below {error}"
        )
    retrieval = length.retrieval
    if retrieval is None or not retrieval.found:
        return f"{text}; retrieval not proven"
    return (
        f"{text}; {retrieval.kept} of {retrieval.found} needles kept ({_at_least(retrieval.low or 0)} to "
        f"{retrieval.high or 0:.0%})"
    )


def _changed(length: CertifiedLength) -> int:
    """How many layers the certify prompts themselves gave less of their budget, or made dense."""
    return sum(layer.rung is not None for layer in length.layers or ())


def _at_least(share: float) -> str:
    """A lower bound in percent, which no rounding makes a certainty."""
    return f"{math.floor(1000 * share) / 10:.1f}%" if 0.995 <= share < 1 else f"{share:.0%}"


def _mean_kl(length: CertifiedLength) -> str:
    """What a budget in KL is compared with."""
    if length.mean_kl is None or length.mean_kl_bound is None:
        return ""
    return f" (mean over prompts {length.mean_kl:.1e}, its bound {length.mean_kl_bound:.1e})"


def tables(certificate: Certificate | None) -> list[Table]:
    """What is certified of each length, both units of a budget in mse, and each kind of text; none without a
    certificate."""
    lengths = _lengths(certificate)
    if not lengths:
        return []
    units = [_units_table(lengths)] if any(layer.rel_mse is not None for layer in lengths[0].layers or ()) else []
    return [_bounds_table(lengths), *units, _domain_table(lengths)]


def _bounds_table(lengths: Sequence[CertifiedLength]) -> Table:
    """One row a length: the largest bounds of its layers, as shares of their limits."""
    columns: dict[str, Callable[[CertifiedLength], str]] = {
        "length": lambda length: formatted(length.length, "d"),
        "prompts": lambda length: formatted(length.prompts, "d"),
        "bound /\nlimit": lambda length: _share(_over_limit(one, one.bound) for one in _bounded(length)),
        "last\neighth": lambda length: _share(_over_limit(one, one.bound_last) for one in _bounded(length)),
        "continued": _continued,
        "KL": lambda length: _value(length.kl, ".1e"),
        "noise": lambda length: formatted(length.noise_floor, ".1e"),
        "top-1": lambda length: _value(length.top1, ".2%"),
        "kept": lambda length: (
            "-" if length.retrieval is None else kept_of(length.retrieval.kept or 0, length.retrieval.found or 0)
        ),
    }
    return Table.of(lengths, columns, "certified")


def _bounded(length: CertifiedLength) -> list[CertifiedLayer]:
    """The layers that are not dense."""
    return [layer for layer in length.layers or () if layer.limit and layer.rung != 0 and layer.density != 1.0]


def _continued(length: CertifiedLength) -> str:
    """The largest bounds of calls that bring few new tokens, by their number."""
    bounds: dict[int | None, list[float]] = {}
    for layer in _bounded(length):
        for one in layer.continued or ():
            bounds.setdefault(one.new_tokens, []).append(_over_limit(layer, one.bound) or 0.0)
    return ", ".join(f"{new_tokens}: {_percent(max(shares))}" for new_tokens, shares in bounds.items()) or "-"


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
    """One row for each length and kind of text."""
    columns: dict[str, Callable[[tuple[CertifiedLength, CertifiedDomain]], str]] = {
        "length": lambda row: formatted(row[0].length, "d"),
        "text": lambda row: row[1].domain or "-",
        "prompts": lambda row: formatted(row[1].prompts, "d"),
        "mean KL": lambda row: formatted(row[1].kl, ".1e"),
        "error /\nlimit": lambda row: formatted(row[1].error_over_limit, ".0%"),
    }
    rows = [(length, domain) for length in lengths for domain in length.domains or ()]
    return Table.of(rows, columns, "by kind of text", align="rlr")


def _lengths(certificate: Certificate | None) -> tuple[CertifiedLength, ...]:
    return (certificate and certificate.lengths) or ()


def _largest(lengths: Iterable[CertifiedLength]) -> float:
    shares = [
        _over_limit(layer, layer.bound)
        for length in lengths
        for layer in length.layers or ()
        if layer.limit and layer.rung != 0
    ]
    return max((share for share in shares if share is not None), default=0.0)


def _over_limit(layer: CertifiedLayer, bound: float | None) -> float | None:
    return None if bound is None or not layer.limit else bound / layer.limit


def _share(shares: Iterable[float | None]) -> str:
    known = [share for share in shares if share is not None]
    return _percent(max(known)) if known else "-"


def _percent(share: float) -> Number:
    return Number(f"{share:.0%}" if share < MOST else f"over {MOST:.0%}", share)


def _value(bound: NextPrompt | None, form: str) -> str:
    return formatted(None if bound is None else bound.value, form)


def _range(counts: Iterable[int | None]) -> str:
    known = sorted({count for count in counts if count})
    return "-" if not known else str(known[0]) if len(known) == 1 else f"{known[0]} to {known[-1]}"
