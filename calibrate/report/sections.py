"""The tables and sentences of a report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from textwrap import shorten
from typing import Any

from calibrate.model.preflight import Preflight
from calibrate.progress import duration
from calibrate.proof.recheck import Recertified, Verified
from calibrate.recipe import Recipe
from calibrate.report.contents import LayerReport, LengthReport, Report
from calibrate.report.summary import ratio, summary
from calibrate.tables import Number, Table, formatted, integer, kept_of
from s2o_runtime.config import plain
from s2o_runtime.fields import counted
from s2o_runtime.profile import Profile, described
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
    domains = [domain for length in lengths for domain in length.domains or () if domain.domain]
    worst = max(domains, key=lambda domain: domain.error_over_limit or 0.0, default=CertifiedDomain())
    number = f"{worst.error_over_limit or 0.0:.0%} of it, estimated from {counted(worst.prompts or 0, 'prompt')}"
    alone = f"; over {worst.domain} alone the largest is {number}" * bool(worst.domain)
    return (
        f"Certified on {_range(length.prompts for length in lengths)} prompts of each length, of "
        f"{_range(length.groups for length in lengths)} groups of text ({_kinds(domains)}): with {confidence:.0%} "
        "confidence, if errors of a kind vary about normally, the mean error of every layer over prompts like these, "
        f"at each of these lengths, is within its limit{alone}."
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
    of_lengths = [_of_length(length, confidence) for length in _lengths(certificate)]
    return of_lengths + [changed] * bool(less + dense) + method


def _of_length(length: CertifiedLength, confidence: float) -> str:
    """The joint claim about prompts, and what these prompts had."""
    if length.share is None:
        text = "every layer is dense"
    else:
        times = "" if length.error_over_limit == 1 else f"{formatted(length.error_over_limit, '.2f')} times "
        text = (
            f"with {confidence:.0%} confidence at this length at least {_at_least(length.share)} of prompts like these "
            f"keep every layer within {times}its limit, over all rows and over those that answer, "
            f"and the KL within {formatted(length.kl, '.1e')} nats, together"
        )
    noise = "" if length.noise_floor is None else f" (two dense implementations: {length.noise_floor:.1e})"
    text += f"; these had a mean KL of {formatted(length.mean_kl, '.1e')}{noise}"
    retrieval = length.retrieval
    if retrieval is None or not retrieval.found:
        return f"{length.length} tokens: {text}; retrieval not proven"
    return (
        f"{length.length} tokens: {text}; {retrieval.kept} of {retrieval.found} needles kept "
        f"({_at_least(retrieval.low or 0)} shown, {retrieval.high or 0:.0%} not refuted)"
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


def _kinds(domains: Sequence[CertifiedDomain]) -> str:
    """The kinds of text, or in how many equal parts, where each has the two groups that `bounds.mean_bound` wants."""
    names = sorted({domain.domain or "" for domain in domains})
    equal = len(names) > 1 and all((domain.groups or 0) > 1 for domain in domains)
    return f"{len(names)} kinds in equal parts" if equal else ", ".join(names)


def _over_limit(layer: CertifiedLayer, bound: float | None) -> float | None:
    return None if bound is None or not layer.limit else bound / layer.limit


def _share(shares: Iterable[float | None]) -> str:
    largest = max((share for share in shares if share is not None), default=None)
    return "-" if largest is None else Number(f"{largest:.0%}", largest)


def _range(counts: Iterable[int | None]) -> str:
    measured = sorted({count for count in counts if count})
    return "-" if not measured else str(measured[0]) if len(measured) == 1 else f"{measured[0]} to {measured[-1]}"


COLUMNS = (
    "length", "tau", "dense\nheads", "tails", "density", "of", "error /\nlimit", "worst\nrow", "needles", "KL"
)  # fmt: skip


def summary_parts(profile: Profile) -> Iterator[Table | str]:
    """The summary in lines and a table, with what was proven."""
    contents = summary(profile)
    for name in ("model", "architecture", "device", "budget", "objective", "proof"):
        yield f"{name:<12}  {contents[name] or 'not recorded'}"
    if (contents["proof"] or "").startswith("held out"):
        yield statement(profile.record.certificate, adjusted_on(profile.record))
    yield from (f"not proven: {sentence}" for sentence in (*contents["problems"], *contents["not_proven"]))
    if contents["retiled"]:
        yield contents["retiled"]
    if contents["unsupported_heads"]:
        count = contents["unsupported_heads"]
        yield f"dense here: {count} heads, whose tail, grain or representatives this version does not have"
    yield Table(COLUMNS, [length_cells(row) for row in contents["lengths"]])
    yield "tau: a head stops visiting keys once the rest would add less than this to its denominator; more skips more"
    yield f"prompts below {profile.min_length} tokens stay dense"


def exported(profile: Profile) -> dict[str, Any]:
    """A profile as JSON: the fields of the file's document, and `buckets` with every layer in place of the tensors."""
    buckets = [
        {"length": length, "layers": [plain(layer) for layer in bucket]}
        for length, bucket in zip(profile.lengths, profile.layers, strict=True)
    ]
    document = described(profile)
    record = document.pop("record")
    return document | {"buckets": buckets, "record": record}


def length_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of `COLUMNS` for one of `summary`'s lengths."""
    return (
        str(row["length"]),
        tau_range(row["tau_min"], row["tau_max"]),
        f"{row['dense_heads']} of {row['heads']}",
        str(row["tails"]),
        formatted(row["density"], ".3f"),
        row["density_is"] or "-",
        formatted(row["error_over_limit"], ".0%"),
        formatted(row["worst"], ".2g"),
        "-" if row["needles"] is None else kept_of(*row["needles"]),
        formatted(row["kl"], ".1e"),
    )


def tau_range(smallest: float | None, largest: float | None) -> str:
    """Both thresholds, of which the smallest is what tables are sorted by; "-" without thresholds."""
    if smallest is None or largest is None:
        return "-"
    return Number(f"{two_digits(smallest)} .. {two_digits(largest)}", smallest)


def two_digits(tau: float) -> str:
    """A threshold as it is shown."""
    return f"{float(f'{tau:.2g}'):g}"  # 150, not 1.5e+02


def times(ratio: float | None) -> str:
    """2.0 -> "2.00x"; "-" for None."""
    return "-" if ratio is None else Number(f"{ratio:.2f}x", ratio)


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


DETAILS = ("tails", "repr.", "tile", "binds")  # columns that the terminal leaves to the report
BINDS = {"mse": "mse", "rel_mse": "rel", None: "-"}  # which limit of a layer is the smaller one
LOOSE = 5e-3  # of its output's mean square; a budget in mse that allows a layer more is pointed out
SHOWN_REASONS = 3  # of all for which no layer gains anything
WORTHWHILE = 1.05  # times dense's speed
CPU_NOTE = " (plain torch: no measure of a GPU)"
GAIN_MORE = "Allow more error, or calibrate for longer prompts (--lengths)."
SHOWN_REASON = 110  # characters of a failed trial's reason; the JSON file has all of them


def gain(report: Report) -> str:
    """How many layers run S2O, what is gained at each length, and at what error; or why nothing is.

    Prefill is measured on a GPU; elsewhere attention's time is predicted, at the lengths that are calibrated.
    """
    total, sparse = len(report.layer_numbers), _sparse_layers(report)
    if not any(sparse.values()):
        layers = [layer for length in report.lengths for layer in length.layers]
        reasons = Counter(layer.why_dense for layer in layers if layer.why_dense).most_common()
        shown = [f"{reason} ({count}x)" for reason, count in reasons[:SHOWN_REASONS]]
        shown += [f"{len(reasons) - SHOWN_REASONS} more below"] if len(reasons) > SHOWN_REASONS else []
        none_of = counted(total, "full-attention layer")
        return f"S2O runs in none of {none_of}, so nothing is gained: {'; '.join(shown)}. {GAIN_MORE}"
    where = ", ".join(f"{count} of {total} at {length}" for length, count in sparse.items())
    ratios, how = _speedups(report)
    gains = ", ".join(f"{gained:.2f}x at {length}" for length, gained in ratios.items() if gained)
    text = f"Full-attention layers that run S2O: {where} tokens; {how.format(gains)}; {_kept(report)}."
    return text if is_worthwhile(report) else f"{text} That is hardly worth deploying. {GAIN_MORE}"


def is_worthwhile(report: Report) -> bool:
    """Whether a profile gains so much at any length that it is worth deploying."""
    ratios, _ = _speedups(report)
    return any(_sparse_layers(report).values()) and max(filter(None, ratios.values()), default=1.0) >= WORTHWHILE


def _sparse_layers(report: Report) -> dict[int, int]:
    """How many layers run S2O, by length."""
    return {length.length: sum(bool(layer.representatives) for layer in length.layers) for length in report.lengths}


def _speedups(report: Report) -> tuple[dict[int, float | None], str]:
    """Times dense's speed by length, and a sentence for them: measured of the prefill, else predicted of attention."""
    if all(length.attention_seconds is not None for length in report.lengths):
        measured = {one.length: ratio(one.dense_prefill_seconds, one.prefill_seconds) for one in report.lengths}
        return measured, "prefill speedup {} tokens"
    return {one.length: ratio(1.0, one.cost) for one in report.lengths}, "attention speedup {} tokens (predicted)"


def _kept(report: Report) -> str:
    """The largest error of a layer as a share of its limit, and the needles of all lengths."""
    largest = max(layer.error_over_limit for length in report.lengths for layer in length.layers)
    needles = [length.needles for length in report.lengths if length.needles is not None]
    needles_kept = (
        f", needles kept {sum(kept for kept, _ in needles)} of {sum(all for _, all in needles)}" if needles else ""
    )
    return f"error at most {largest:.0%} of a layer's limit{needles_kept}"


def layer_table(report: Report, length: LengthReport, *, brief: bool = False) -> Table:
    """One row a layer; "1/32: 6/2" says that 6 heads have 1 representative and 2 have 32.

    brief: without how keys are ranked and the tile, so that a row has at most 80 columns.

    An mse says nothing without the output that it is of, so the relative one stands beside it, and with a ceiling which
    of the two limits binds.
    """
    relative, ceiling = report.budget.unit == "mse", report.budget.ceiling is not None
    settings = ("layer", "tau", "dense\nheads", "tails", "repr.", "segment", "tile")
    errors = ("mse", "rel\nmse") if relative else ("rel_mse",)
    limits = ("error /\nlimit", *(("binds",) if ceiling else ()))
    outcome = ("density", *errors, *limits, "worst\nrow", "vs\ndense")
    title = f"{length.length} tokens, as adjusted{length.remark}"
    names, rows = settings + outcome, [_layer_cells(layer, relative, ceiling) for layer in length.layers]
    if brief:
        shown = [number for number, name in enumerate(names) if name not in DETAILS]
        names, rows = tuple(names[number] for number in shown), [tuple(row[n] for n in shown) for row in rows]
    return Table(names, rows, title, wrap=None if brief else "repr.")


def _layer_cells(layer: LayerReport, relative: bool, ceiling: bool) -> tuple[str, ...]:
    return (
        integer(layer.layer),
        tau_range(layer.tau_min, layer.tau_max),
        integer(layer.dense_heads),
        integer(layer.tails),
        _counts(layer.representatives),
        integer(layer.segment),
        layer.tile if layer.scores == "input" else f"{layer.tile} {layer.scores}",
        formatted(layer.density, ".3f"),
        formatted(layer.error, ".2e"),
        *([formatted(layer.held_out_rel_mse, ".0e")] if relative else []),
        formatted(layer.error_over_limit, ".0%"),
        *([BINDS[layer.binds]] if ceiling else []),
        formatted(layer.worst, ".2g"),
        _speedup(layer.dense_seconds, layer.seconds),
    )


def overview_table(report: Report) -> Table:
    """One row a length; the error is the largest of any layer, or their mean if the budget is of the model."""
    units = ("mse", "rel_mse") if report.budget.kind == "mse" else (report.budget.unit,)
    which = "largest" if report.budget.scope == "layer" else "mean"
    errors = tuple(f"{which}\n{unit}" for unit in units)
    names = ("length", *errors, "error /\nlimit", "density", "attention", "prefill", "needles", "KL")
    title = f"all lengths, as adjusted to {report.budget.unit} {report.budget.value:g}"
    return Table(names, [_overview_cells(report, length) for length in report.lengths], title)


def _overview_cells(report: Report, length: LengthReport) -> tuple[str, ...]:
    errors = [[layer.error for layer in length.layers]]
    if report.budget.kind == "mse":
        errors.append([layer.held_out_rel_mse for layer in length.layers])
    return (
        Number(f"{length.length}{'' if length.calibrated else ' checked'}", length.length),
        *(
            formatted(max(unit_errors) if report.budget.scope == "layer" else fmean(unit_errors), ".2e")
            for unit_errors in errors
        ),
        formatted(max(layer.error_over_limit for layer in length.layers), ".0%"),
        formatted(fmean(layer.density for layer in length.layers), ".3f"),
        _attention_speedup(length),
        _speedup(length.dense_prefill_seconds, length.prefill_seconds),
        "-" if length.needles is None else kept_of(*length.needles),
        formatted(length.kl, ".1e"),
    )


def length_notes(report: Report, length: LengthReport) -> list[str]:
    """The sentences below a length's table."""
    speedup = _speedup(length.dense_prefill_seconds, length.prefill_seconds)
    notes = [
        f"prefill of {length.length} tokens on {report.device}: {length.prefill_seconds * 1e3:.1f} ms, "
        f"dense {length.dense_prefill_seconds * 1e3:.1f} ms ({speedup})"
        + (CPU_NOTE if length.attention_seconds is None else ""),
        f"against the dense model: KL {length.kl:.1e} nats, top-1 the same at {length.top1:.2%} of positions"
        + ("" if length.needles is None else ", needles {} of {}".format(*length.needles)),
    ]
    if uniform := _uniform_note(length):
        notes.append(uniform)
    reasons: dict[str, list[int]] = {}
    for layer in length.layers:
        if layer.why_dense:
            reasons.setdefault(layer.why_dense, []).append(layer.layer)
    notes += [f"{layer_ranges(numbers)} dense: {reason}" for reason, numbers in reasons.items()]
    notes += filter(None, (_ceiling_note(report, length), _loose_note(report, length)))
    if tightened := [layer.layer for layer in length.layers if layer.tightened]:
        notes.append(f"{layer_ranges(tightened)} tightened by what the prompts of this table showed")
    return notes


def _ceiling_note(report: Report, length: LengthReport) -> str | None:
    """Which layers the ceiling beside a budget in mse allows less than that."""
    limits = {layer.layer: layer.limit for layer in length.layers if layer.binds == "rel_mse"}
    if report.budget.ceiling is None or not limits:
        return None
    return (
        f"{layer_ranges(limits)}: the ceiling, rel_mse {report.budget.ceiling:g}, allows less than mse "
        f"{report.budget.value:g}, down to an mse of {min(limits.values()):.1e}"
    )


def _loose_note(report: Report, length: LengthReport) -> str | None:
    """Which layers a budget in mse without a ceiling allows much of their output, because that is small."""
    if report.budget.kind != "mse" or report.budget.ceiling is not None:
        return None
    allowed = {
        layer.layer: layer.limit * layer.held_out_rel_mse / layer.held_out_mse
        for layer in length.layers
        if layer.held_out_mse > 0 and layer.why_dense is None
    }
    loose = [layer for layer, share in allowed.items() if share > LOOSE]
    if not loose:
        return None
    return (
        f"{layer_ranges(loose)}: this mse is up to {max(allowed[layer] for layer in loose):.1%} of the output's mean "
        f"square, where {LOOSE:.1%} is much: --ceiling-rel-mse limits that"
    )


def _uniform_note(length: LengthReport) -> str | None:
    """How this compares with one setting for all heads, measured where both are, otherwise predicted."""
    uniform = length.uniform
    if uniform is None:
        return None
    measured = ratio(uniform.seconds, length.attention_seconds)
    gained = measured or ratio(uniform.cost, length.cost)
    if not gained:
        return None
    verdict = f"{gained:.2f}x faster" if gained >= 1 else f"{1 / gained:.2f}x slower"
    return (
        f"attention: {'' if measured else 'predicted '}{verdict} than the best single threshold at the same error (tau "
        f"{two_digits(uniform.tau)}, segment {uniform.segment}, repr. {uniform.representatives}, tail {uniform.tail})"
    )


def closing_notes(report: Report) -> list[str]:
    """The sentences about all lengths together. An indented one belongs to the one before it."""
    notes = [note] if (note := _prediction_note(report)) else []
    if report.failed_trials:
        notes.append(f"{report.failed_trials} of {report.trials} trials failed and were left out:")
        by_count = sorted(report.failures.items(), key=lambda item: -item[1])
        notes += [f"  {count}x {shorten(reason, SHOWN_REASON)}" for reason, count in by_count]
    return notes


def facts(report: Report) -> list[tuple[str, str]]:
    """How the profile was made, by name."""
    phases = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in report.phases.items())
    return [
        ("model", f"{report.model} ({report.architecture})"),
        ("weights", "random" if report.random_weights else "the model's"),
        ("hardware", report.device),
        ("versions", ", ".join(f"{name} {version}" for name, version in report.versions.items())),
        ("data", report.data),
        ("seed", str(report.seed)),
        ("lengths", ", ".join(str(length.length) for length in report.lengths if length.calibrated)),
        ("worst row", "not limited" if report.worst_rows is None else f"at most {report.worst_rows:g}"),
        ("time", f"{report.calibration_seconds:.0f} s ({phases})"),
        ("trials", f"{report.trials}, of which {report.failed_trials} failed"),
        ("journal", f"{report.journal.path}, {report.journal.reused} measurements reused"),
    ]


def shared_studies(length: LengthReport) -> list[str]:
    """Which layers shared a study, as a sentence if any did."""
    shared = [layer_ranges(group) for group in length.groups if len(group) > 1]
    return [f"shared a study: {'; '.join(shared)}"] if shared else []


def not_shown(report: Report) -> list[str]:
    """What a reader might take for shown although it is not."""
    lengths = report.lengths
    calibrated = [length.length for length in lengths if length.calibrated]
    checked = [str(length.length) for length in lengths if not length.calibrated]
    notes = [f"{sentence[:1].upper()}{sentence[1:]}." for sentence in report.not_proven]
    if not report.met:
        notes.append("That the error is within the budget: see the problems at the top.")
    if report.random_weights:
        notes.append(
            "Anything about the trained model: the weights were random, so its errors and densities are others."
        )
    if checked:
        notes.append(
            f"That {', '.join(checked)} tokens are served as well as they could be: the settings there come from "
            "other lengths."
        )
    if any(length.attention_seconds is None for length in lengths):
        notes.append("How fast it is: there was no GPU, and a CPU runs the plain reference.")
    if any(length.needles is None for length in lengths):
        notes.append("Whether needles are found: the prompts of some lengths ask for none.")
    if report.worst_rows is None:
        notes.append("A limit on the worst rows: only means are limited.")
    if calibrated:
        notes.append(f"Prompts below {min(calibrated)} tokens: they stay dense.")
    longest = max(length.length for length in lengths)
    others = "" if report.certificate else ", and text unlike the held-out prompts"
    return [*notes, f"Prompts beyond {longest} tokens{others}."]


def _prediction_note(report: Report) -> str | None:
    """The layers that were furthest from what was predicted: of the error as a share of the limit, of the time."""
    errors, seconds = [], []
    for length in report.lengths:
        for layer in length.layers:
            where = f"layer {layer.layer} at {length.length} tokens"
            if layer.predicted_error is not None and layer.limit:
                text = f"{where}: {layer.predicted_error:.2e}, held out {layer.error:.2e}"
                errors.append((abs(layer.error - layer.predicted_error) / layer.limit, text))
            if layer.predicted_seconds and layer.seconds is not None:
                text = f"{where}: {layer.predicted_seconds * 1e3:.3g} ms, measured {layer.seconds * 1e3:.3g} ms"
                seconds.append((abs(layer.seconds - layer.predicted_seconds) / layer.predicted_seconds, text))
    largest = [(max(errors), "error by {:.0%} of the limit ({})")] if errors else []
    largest += [(max(seconds), "time by {:.0%} ({})")] if seconds else []
    if not largest:
        return None
    return "furthest from what was predicted: " + ", ".join(form.format(*deviation) for deviation, form in largest)


def layer_ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "layers 0-2, 5" """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"layer {text}" if text.isdigit() else f"layers {text}"


def _attention_speedup(length: LengthReport) -> str:
    """The speedup of all layers' attention together; the predicted one where it was not measured."""
    if length.attention_seconds is not None:
        return _speedup(length.dense_attention_seconds, length.attention_seconds)
    predicted = ratio(1.0, length.cost)
    return "-" if predicted is None else Number(f"{predicted:.2f}x predicted", predicted)


def _speedup(dense: float | None, sparse: float | None) -> str:
    return times(ratio(dense, sparse))


def _counts(counts: dict[str, int]) -> str:
    """{"1": 6, "32": 2} -> "1/32: 6/2" """
    return f"{'/'.join(counts)}: {'/'.join(map(str, counts.values()))}" if counts else "-"
