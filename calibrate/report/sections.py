"""The tables and sentences of a report, of a profile and of its certificate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from textwrap import shorten
from typing import Any

from calibrate.model.preflight import Preflight
from calibrate.progress import format_duration
from calibrate.prompts.questions import EIGHTHS
from calibrate.proof.layers import PLACES
from calibrate.proof.recheck import CertificateCheck, LengthCheck, ProofCheck
from calibrate.recipe import Recipe
from calibrate.record import Certificate, CertifiedDomain, CertifiedLayer, CertifiedLength, Record, read_record
from calibrate.report.contents import LengthReport, Report, divide, summarise_profile
from calibrate.tables import Number, Table, format_integer, format_kept, format_number
from s2o_runtime.config import LOOKBACK, convert_to_json
from s2o_runtime.fields import format_ranges, group_by_key, pluralize
from s2o_runtime.profile import Profile, make_document

Columns = dict[str, Callable[[Any], str]]  # of a table: a row's cell, by the column's title


def show(name: str, form: str, unit: str = "") -> Callable[[Any], str]:
    """Return a column of a field, or of a key, in this format; "-" for None."""

    def format_cell(row: Any) -> str:
        value = row.get(name) if isinstance(row, Mapping) else getattr(row, name)
        return "-" if value is None else Number(format(value, form) + unit, value)

    return format_cell


def describe_certificate(certificate: Certificate | None, adjusted_on: int | None) -> str:
    """Return one sentence on what was shown of means at all lengths: of the answers, or of all layers together.

    certificate: None if the profile has none. adjusted_on: prompts of each length; None if that is not recorded.
    """
    lengths = _get_lengths(certificate)
    if not lengths:
        same = "the same prompts" if adjusted_on is None else f"the same {adjusted_on} prompts of each length"
        return f"Adjusted and checked on {same}; not certified."
    confidence = (certificate and certificate.confidence) or 0.0
    answers = lengths[0].answers is not None
    domains = [domain for length in lengths for domain in length.domains or () if domain.domain]
    worst = max(domains, key=lambda domain: domain.error_over_limit or 0.0, default=CertifiedDomain())
    number = f"{worst.error_over_limit or 0.0:.0%} of it, estimated from {pluralize(worst.prompts or 0, 'prompt')}"
    alone = f"; over {worst.domain} alone the largest is {number}" * bool(worst.domain)
    names = sorted({domain.domain or "" for domain in domains})
    # parts are equal where every kind of text has the two groups that `bounds.bound_mean` wants
    equal = len(names) > 1 and all((domain.groups or 0) > 1 for domain in domains)
    kinds_of_text = f"{len(names)} kinds in equal parts" if equal else ", ".join(names)
    return (
        f"Certified on {format_range(length.prompts for length in lengths)} prompts of each length, of "
        f"{format_range(length.groups for length in lengths)} groups of text ({kinds_of_text}): with "
        f"{confidence:.0%} confidence, if errors of a kind vary about normally, "
        + (
            "the mean KL of answers behind prompts like these, at each of these lengths, is within the budget, where "
            "a prompt counts with at most ten times the budget."
            if answers
            else f"the mean error of every layer over prompts like these, at each of these lengths, is within its limit"
            f"{alone}."
        )
    )


def count_adjusted_on(record: Record) -> int | None:
    """Return how many prompts of each length a profile's layers were adjusted on; None if that is not recorded."""
    lengths = [prompt.length for prompt in (record.data and record.data.held_out) or ()]
    return min((lengths.count(length) for length in set(lengths)), default=None)


def list_claims(certificate: Certificate | None) -> list[str]:
    """List what is certified of prompts at each length, and how."""
    if certificate is None:
        return []
    layers = [layer for length in _get_lengths(certificate) for layer in length.layers or ()]
    dense = sum(layer.spent == 0 for layer in layers)
    less = sum(layer.spent is not None for layer in layers) - dense
    changed = f"{pluralize(less, 'layer')} got less of the budget than was adjusted, and {dense} became dense"
    return [
        *(_describe_certified(length, certificate.confidence or 0.0) for length in _get_lengths(certificate)),
        *([changed] if less + dense else ()),
        *([f"how: {certificate.method}"] if certificate.method else ()),
    ]


def _describe_certified(length: CertifiedLength, confidence: float) -> str:
    """Return the claim about answers of a length, or the KL that its prompts had, and the needles."""
    answers = length.answers
    if answers is None and length.mean_kl is None:
        text = "the dense model, which had found no needle, read none of these prompts"
    elif answers is None:
        text = f"these prompts had a mean KL of {format_number(length.mean_kl, '.1e')}"
    else:
        noise = "" if answers.noise is None else f", two dense kernels {answers.noise:.1e}"
        less = "" if answers.spent is None else f", with {answers.spent:.0%} of what layers were to spend"
        whose = " as the documents give them" * bool(answers.quoted)
        text = (
            f"answers{whose} have a KL of {format_number(answers.mean, '.1e')} nats per token, at most "
            f"{format_number(answers.bound, '.1e')} with the certificate's confidence{less} (worst eighth of the "
            f"prompts {format_number(answers.worst_eighth, '.1e')}, second turns "
            f"{format_number(answers.second_turn, '.1e')}{noise}); with {confidence:.0%} confidence at most "
            f"{math.ceil(1000 * (answers.share_above or 0.0)) / 10:.3g}% of prompts are above ten times the budget"
        )
    retrieval = length.retrieval
    if retrieval is None or not retrieval.found:
        return f"{length.length} tokens: {text}; retrieval not proven"
    return (
        f"{length.length} tokens: {text}; {retrieval.kept} of {retrieval.found} needles kept "
        f"({math.floor(1000 * (retrieval.low or 0) + 1e-9) / 10:.3g}% shown, {retrieval.high or 0:.0%} not refuted)"
    )


def _format_needles(length: CertifiedLength | LengthCheck) -> str:
    retrieval = length.retrieval
    return "-" if retrieval is None else format_kept(retrieval.kept or 0, retrieval.found or 0)


def make_certificate_tables(certificate: Certificate | None) -> list[Table]:
    """Return what is certified of each length, both units of a budget in mse, and each kind of text; none without a
    certificate."""
    lengths = _get_lengths(certificate)
    if not lengths:
        return []

    def of_answers(name: str, form: str) -> Callable[[CertifiedLength], str]:
        return lambda length: show(name, form)(length.answers)

    if lengths[0].answers is not None:
        measured: Columns = {
            "length": show("length", "d"),
            "prompts": show("prompts", "d"),
            "groups": show("groups", "d"),
            "KL": of_answers("mean", ".1e"),
            "bound": of_answers("bound", ".1e"),
            "worst\neighth": of_answers("worst_eighth", ".1e"),
            "second\nturn": of_answers("second_turn", ".1e"),
            "two\nkernels": of_answers("noise", ".1e"),
            "above\nten times": of_answers("above", "d"),
            "spent": of_answers("spent", ".0%"),
            "kept": _format_needles,
        }
        return [Table.from_rows(lengths, measured, "certified answers, nats per token"), _make_domain_table(lengths)]

    def over_limit(length: CertifiedLength, bound: Callable[[CertifiedLayer], float | None]) -> str:
        sparse = [(bound(layer), layer.limit) for layer in length.layers or () if layer.density != 1.0]
        return _format_largest((value / limit for value, limit in sparse if value is not None and limit), ".0%")

    bounds: Columns = {
        "length": show("length", "d"),
        "prompts": show("prompts", "d"),
        "groups": show("groups", "d"),
        "less": lambda length: format_integer(sum(layer.spent is not None for layer in length.layers or ())),
        "mean /\nlimit": lambda length: over_limit(length, lambda layer: layer.mean),
        "bound /\nlimit": lambda length: over_limit(length, lambda layer: layer.bound),
        "mean KL": show("mean_kl", ".1e"),
        "kept": _format_needles,
    }

    def by_ceiling(length: CertifiedLength) -> str:
        limits = [layer.binds for layer in length.layers or ()]
        return f"{limits.count('rel_mse')} of {len(limits)} layers" if any(limits) else "-"

    units: Columns = {
        "length": bounds["length"],
        "largest bound, mse": lambda length: _format_largest((layer.bound for layer in length.layers or ()), ".2e"),
        "as rel_mse": lambda length: _format_largest((layer.rel_bound for layer in length.layers or ()), ".2e"),
        "the ceiling binds in": by_ceiling,
    }
    in_mse = any(layer.rel_mse is not None for layer in lengths[0].layers or ())
    both = [Table.from_rows(lengths, units, "in both units")] if in_mse else []
    return [Table.from_rows(lengths, bounds, "certified"), *both, _make_domain_table(lengths)]


def _make_domain_table(lengths: Sequence[CertifiedLength]) -> Table:
    """Return a row for each kind of text: its mean error over the limit at each length, the largest of all else."""
    texts: dict[str, dict[int | None, CertifiedDomain]] = {}
    for length in lengths:
        for domain in length.domains or ():
            texts.setdefault(domain.domain or "-", {})[length.length] = domain

    def show_at(length: int | None, name: str, form: str) -> Callable[[str], str]:
        return lambda text: format_number(getattr(texts[text].get(length, CertifiedDomain()), name), form)

    columns: Columns = {
        "text": str,
        "prompts": lambda text: format_range(domain.prompts for domain in texts[text].values()),
        "groups": lambda text: format_range(domain.groups for domain in texts[text].values()),
    }
    if lengths[0].answers is not None:
        columns |= {f"KL at\n{length.length}": show_at(length.length, "kl", ".1e") for length in lengths}
    else:
        for length in lengths:
            columns[f"error / limit\nat {length.length}"] = show_at(length.length, "error_over_limit", ".0%")
        columns["mean KL"] = lambda text: _format_largest((domain.kl for domain in texts[text].values()), ".1e")
    return Table.from_rows(sorted(texts), columns, "by kind of text", align="lr")


def _get_lengths(certificate: Certificate | None) -> tuple[CertifiedLength, ...]:
    return (certificate and certificate.lengths) or ()


def _format_largest(numbers: Iterable[float | None], form: str) -> str:
    return format_number(max((number for number in numbers if number is not None), default=None), form)


def format_range(counts: Iterable[int | None]) -> str:
    measured = sorted({count for count in counts if count})
    return "-" if not measured else str(measured[0]) if len(measured) == 1 else f"{measured[0]} to {measured[-1]}"


# of one of `summary`'s lengths
COLUMNS: Columns = {
    "length": lambda row: str(row["length"]),
    "tau": lambda row: format_taus(row["tau_min"], row["tau_max"]),
    "dense\nheads": lambda row: f"{row['dense_heads']} of {row['heads']}",
    "tails": lambda row: str(row["tails"]),
    "density": show("density", ".3f"),
    "of": lambda row: row["density_is"] or "-",
    "error /\nlimit": show("error_over_limit", ".0%"),
    "worst\nrow": show("worst", ".2g"),
    "needles": lambda row: format_kept(*row["needles"]) if row["needles"] else "-",
    "KL": show("kl", ".1e"),
}


PLACE_ROWS = ("row 0", *(f"{first}-{last - 1}" for first, last in pairwise(PLACES[1:])), "later rows")  # of a segment
PARTS = (  # of one of `summary`'s lengths: a list of each layer's errors by part, what they are, and their format
    ("layer_eighths", "by eighth of the prompts, of its limit", ".0%"),
    ("layer_places", f"by row of a segment ({', '.join(PLACE_ROWS)}), times its mean", ".2g"),
)


def show_summary(profile: Profile) -> Iterator[Table | str]:
    """Yield the summary in lines and a table, with what was proven."""
    contents, record = summarise_profile(profile), read_record(profile)
    for name in ("model", "architecture", "device", "budget", "objective", "proof"):
        yield f"{name:<12}  {contents[name] or 'not recorded'}"
    if (contents["proof"] or "").startswith("held out"):
        yield describe_certificate(record.certificate, count_adjusted_on(record))
    yield from (f"not proven: {sentence}" for sentence in (*contents["problems"], *contents["not_proven"]))
    if contents["retiled"]:
        yield contents["retiled"]
    if contents["unsupported_heads"]:
        count = contents["unsupported_heads"]
        yield f"dense here: {count} heads, whose tail, grain, scores or representatives this version does not have"
    yield Table.from_rows(contents["lengths"], COLUMNS)
    numbers = profile.geometry.layer_numbers or range(profile.geometry.layers)
    for length in contents["lengths"]:
        for name, text, form in PARTS:
            layers = [(number, parts) for number, parts in zip(numbers, length[name], strict=False) if parts]
            for number, parts in sorted(layers, key=lambda layer: max(layer[1]))[-1:]:
                shown = " ".join(format(part, form) for part in parts)
                yield f"{length['length']} tokens: layer {number} errs most {text}: {shown}"
    yield "tau: a head stops visiting keys once the rest would add less than this to its denominator; more skips more"
    yield f"prompts below {profile.min_length} tokens stay dense"


def export_profile(profile: Profile) -> dict[str, Any]:
    """Return a profile as JSON: the file's document, with `buckets` of all layers in place of the tensors."""
    document = make_document(profile)
    record = document.pop("record")
    buckets = [
        {"length": length, "layers": [convert_to_json(layer) for layer in bucket]}
        for length, bucket in zip(profile.lengths, profile.layers, strict=True)
    ]
    return document | {"buckets": buckets, "record": record}


def format_taus(smallest: float | None, largest: float | None) -> str:
    """Format both thresholds, of which the smallest is what tables are sorted by; "-" without thresholds."""
    if smallest is None or largest is None:
        return "-"
    return Number(f"{format_tau(smallest)} .. {format_tau(largest)}", smallest)


def format_tau(tau: float) -> str:
    """Format a threshold."""
    return f"{float(f'{tau:.2g}'):g}"  # 150, not 1.5e+02


def format_speedup(ratio: float | None) -> str:
    """Format a speedup: 2.0 -> "2.00x"; "-" for None."""
    return "-" if ratio is None else Number(f"{ratio:.2f}x", ratio)


def list_verify_plan(recipe: Recipe, preflight: Preflight, seconds: Mapping[str, float]) -> dict[str, str]:
    """Name what is measured again, and how long its phases take at most."""
    phases = ", ".join(f"{name} {format_duration(expected)}" for name, expected in seconds.items())
    count = recipe.held_out if "proving" in seconds else recipe.num_certify
    return {
        "takes": f"at most about {format_duration(sum(seconds.values()))} ({phases})",
        "model": recipe.model,
        "layers": preflight.layers,
        "lengths": ", ".join(map(str, sorted(recipe.all_lengths))),
        "prompts": f"{count} of each length, {recipe.prompt_source}",
    }


def show_proof(proof: ProofCheck) -> Iterator[Table | str]:
    """Yield what the prompts that layers were adjusted on show here: a row for each length."""
    columns: Columns = {
        "length": lambda row: str(row["length"]),
        "largest error": lambda row: f"{max(layer['error'] for layer in row['layers']):.2e}",
        "rel_mse": lambda row: f"{max(layer['rel_mse'] for layer in row['layers']):.2e}",
        "error / limit": lambda row: (
            f"{max(layer['error'] / layer['limit'] if layer['limit'] else 0.0 for layer in row['layers']):.0%}"
        ),
        "density": lambda row: f"{fmean(layer['density'] for layer in row['layers']):.3f}",
        "needles": COLUMNS["needles"],
        "KL": show("kl", ".1e"),
        "of answers": lambda row: show("kl", ".1e")(row["answers"]),
        "worst eighth": lambda row: show("worst_eighth", ".1e")(row["answers"]),
        "noise": lambda row: show("noise", ".1e")(row["answers"]),
    }
    yield Table.from_rows(proof.lengths, columns, "proven here")
    yield (
        "KL: nats per token, all over the prompt; of answers: of turns that ask about each eighth of a prompt behind "
        "its finished prefill; noise: of answers, between two dense kernels"
    )
    if any(row["answers"]["quoted"] for row in proof.lengths):
        yield "the answers are the documents' own, because the model is not whole on the device"
    if not proof.same_prompts:
        yield "the prompts are not those the profile was proven on"


def show_certificate(check: CertificateCheck) -> Iterator[Table | str]:
    """Yield what fresh prompts show of a certificate: a row for each prompt, and then one for each length."""
    of_prompt = {
        "text": show("domain", ""),
        "group": show("group", ""),
        "KL": show("kl", ".1e"),
        "error / limit": show("error_over_limit", ".0%"),
    }
    for length in check.lengths:
        yield Table.from_rows(length.of_prompts, of_prompt, f"fresh prompts of {length.length} tokens", align="llr")
    columns = {
        "length": show("length", "d"),
        "prompts": show("prompts", "d"),
        "groups": show("groups", "d"),
        "mean / limit": show("means", ".0%"),
        "broken": show("broken", "d"),
        "above": show("above", "d"),
        "chance": show("chance", ".1%"),
        "mean KL": show("mean_kl", ".1e"),
        "kept": _format_needles,
    }
    yield Table.from_rows(check.lengths, columns, "the certificate on fresh prompts")
    yield (
        "mean / limit: of the layer that is nearest to its limit; broken: layers whose mean is over it by more than "
        "chance explains, at 5% for all together; above: groups of text above ten times a budget of answers; "
        "chance: of so many or more"
    )


DETAILS = ("tails", "repr.", "tile", "binds")  # columns that the terminal leaves to the report
BINDS = {"mse": "mse", "rel_mse": "rel", None: "-"}  # which limit of a layer is the smaller one
LOOSE = 5e-3  # of its output's mean square; a budget in mse that allows a layer more is pointed out
SHOWN_REASONS = 3  # of all for which no layer gains anything
WORTHWHILE = 1.05  # times dense's speed
CPU_NOTE = " (plain torch: no measure of a GPU)"
GAIN_MORE = "Allow more error, or calibrate for longer prompts (--lengths)."
SHOWN_REASON = 110  # characters of a failed trial's reason; the JSON file has all of them


def describe_gain(report: Report) -> str:
    """Describe how many layers run S2O, what is gained at each length, and at what error; or why nothing is.

    Prefill is measured on a GPU; elsewhere attention's time is predicted, at the lengths that are calibrated.
    """
    total, sparse = len(report.layer_numbers), _count_sparse_layers(report)
    layers = [layer for length in report.lengths for layer in length.layers]
    if not any(sparse.values()):
        reasons = Counter(layer.why_dense for layer in layers if layer.why_dense).most_common()
        shown = [f"{reason} ({count}x)" for reason, count in reasons[:SHOWN_REASONS]]
        shown += [f"{len(reasons) - SHOWN_REASONS} more below"] if len(reasons) > SHOWN_REASONS else []
        none_of = pluralize(total, "full-attention layer")
        return f"S2O runs in none of {none_of}, so nothing is gained: {'; '.join(shown)}. {GAIN_MORE}"
    where = ", ".join(f"{count} of {total} at {length}" for length, count in sparse.items())
    ratios, form = _compute_speedups(report)
    gains = ", ".join(f"{speedup:.2f}x at {length}" for length, speedup in ratios.items() if speedup)
    needles = [length.needles for length in report.lengths if length.needles is not None]
    kept = f", needles kept {sum(k for k, _ in needles)} of {sum(n for _, n in needles)}" if needles else ""
    error = f"error at most {max(layer.error_over_limit for layer in layers):.0%} of a layer's limit{kept}"
    text = f"Full-attention layers that run S2O: {where} tokens; {form.format(gains)}; {error}."
    return text if is_worthwhile(report) else f"{text} That is hardly worth deploying. {GAIN_MORE}"


def is_worthwhile(report: Report) -> bool:
    """Return whether a profile gains so much at any length that it is worth deploying."""
    ratios, _ = _compute_speedups(report)
    return any(_count_sparse_layers(report).values()) and max(filter(None, ratios.values()), default=1.0) >= WORTHWHILE


def _count_sparse_layers(report: Report) -> dict[int, int]:
    """Count the layers that run S2O, by length."""
    return {length.length: sum(bool(layer.representatives) for layer in length.layers) for length in report.lengths}


def _compute_speedups(report: Report) -> tuple[dict[int, float | None], str]:
    """Return the speedups over dense by length, measured of the prefill or else predicted of attention, and their
    sentence."""
    if all(length.attention_seconds is not None for length in report.lengths):
        return {row.length: row.prefill_speedup for row in report.lengths}, "prefill speedup {} tokens"
    return {row.length: row.attention_speedup for row in report.lengths}, "attention speedup {} tokens (predicted)"


def make_layer_table(report: Report, length: LengthReport, *, brief: bool = False) -> Table:
    """Return one row a layer; "1/32: 6/2" means that 6 heads have 1 representative and 2 have 32.

    An mse says nothing without the output that it is of, so the relative one stands beside it, and with a ceiling which
    of the two limits binds. A `brief` one leaves `DETAILS` out, so that a row has at most 80 columns.
    """
    relative, ceiling = report.budget.kind == "mse", report.budget.ceiling is not None
    columns: Columns = {
        "layer": show("layer", "d"),
        "tau": lambda layer: format_taus(layer.tau_min, layer.tau_max),
        "dense\nheads": show("dense_heads", "d"),
        "tails": show("tails", "d"),
        "repr.": lambda layer: (
            f"{'/'.join(layer.representatives)}: {'/'.join(map(str, layer.representatives.values()))}"
            if layer.representatives
            else "-"
        ),
        "segment": lambda layer: f"{layer.segment}" + f"+{layer.lookback}" * (layer.lookback != LOOKBACK),
        "tile": show("tile", ""),
        "density": show("density", ".3f"),
        report.budget.unit: show("error", ".2e"),
        "rel\nmse": show("held_out_rel_mse", ".0e"),
        "error /\nlimit": show("error_over_limit", ".0%"),
        "binds": lambda layer: BINDS[layer.binds],
        "worst\nrow": show("worst", ".2g"),
        "vs\ndense": lambda layer: format_speedup(divide(layer.dense_seconds, layer.seconds)),
    }
    left_out = {*(DETAILS if brief else ()), "" if relative else "rel\nmse", "" if ceiling else "binds"}
    return Table.from_rows(
        length.layers,
        {name: cell for name, cell in columns.items() if name not in left_out},
        length.label.replace("tokens", "tokens, as adjusted"),
        wrap=None if brief else "repr.",
    )


def make_parts_table(report: Report) -> Table:
    """Return a row for each length and layer that errs: by eighth over its limit, by row of a segment over its mean."""
    names = ("length", "layer", *(f"eighth {number}" for number in range(1, EIGHTHS + 1)), *PLACE_ROWS)
    rows = [
        (
            *map(format_integer, (length.length, layer.layer)),
            *(format_number(share, ".0%") for share in layer.eighths),
            *(format_number(ratio, ".2g") for ratio in layer.places),
        )
        for length in report.lengths
        for layer in length.layers
        if layer.eighths and layer.places
    ]
    return Table(names, rows)


def make_overview_table(report: Report) -> Table:
    """Return one row a length; the error is the largest of any layer."""

    def attention_speedup(length: LengthReport) -> str:
        if length.attention_seconds is not None or length.attention_speedup is None:
            return format_speedup(length.attention_speedup)
        return Number(f"{length.attention_speedup:.2f}x predicted", length.attention_speedup)

    errors: Columns = {
        f"largest\n{report.budget.unit}": lambda length: format_number(max(row.error for row in length.layers), ".2e")
    }
    if report.budget.kind == "mse":
        errors["largest\nrel_mse"] = lambda length: format_number(
            max(layer.held_out_rel_mse for layer in length.layers), ".2e"
        )
    columns: Columns = {
        "length": lambda length: Number(f"{length.length}{'' if length.calibrated else ' checked'}", length.length),
        **errors,
        "error /\nlimit": lambda length: format_number(max(layer.error_over_limit for layer in length.layers), ".0%"),
        "density": lambda length: format_number(fmean(layer.density for layer in length.layers), ".3f"),
        "attention": attention_speedup,
        "prefill": show("prefill_speedup", ".2f", "x"),
        "needles": lambda length: format_kept(*length.needles) if length.needles else "-",
        "KL": show("kl", ".1e"),
    }
    title = f"all lengths, as adjusted to {report.budget.kind} {report.budget.value:g}"
    return Table.from_rows(report.lengths, columns, title)


def list_length_notes(report: Report, length: LengthReport, *, studies: bool = False) -> list[str]:
    """List the sentences below a length's table; with `studies` the layers that shared one are named."""
    speedup = format_speedup(length.prefill_speedup)
    notes = [
        f"prefill of {length.length} tokens on {report.device}: {length.prefill_seconds * 1e3:.1f} ms, "
        f"dense {length.dense_prefill_seconds * 1e3:.1f} ms ({speedup})"
        + (CPU_NOTE if length.attention_seconds is None else ""),
        f"against the dense model: KL {length.kl:.1e} nats, top-1 the same at {length.top1:.2%} of positions"
        + ("" if length.needles is None else ", needles {} of {}".format(*length.needles)),
    ]
    reasons = group_by_key((layer.why_dense, layer.layer) for layer in length.layers if layer.why_dense)
    notes += [f"{format_layers(numbers)} dense: {reason}" for reason, numbers in reasons.items()]
    notes += _describe_limits(report, length)
    if tightened := [layer.layer for layer in length.layers if layer.tightened]:
        notes.append(f"{format_layers(tightened)} tightened by what the prompts of this table showed")
    if studies and (shared := [format_layers(group) for group in length.groups if len(group) > 1]):
        notes.append(f"shared a study: {'; '.join(shared)}")
    return notes


def _describe_limits(report: Report, length: LengthReport) -> list[str]:
    """Name the layers that the ceiling beside a budget in mse holds, or those that need one as their outputs are small.

    A layer that is allowed more than `LOOSE` of its output's mean square needs one.
    """
    budget = report.budget
    if budget.ceiling is not None:
        held = {layer.layer: layer.limit for layer in length.layers if layer.binds == "rel_mse"}
        sentence = "the ceiling, rel_mse {:g}, allows less than mse {:g}, down to an mse of {:.1e}"
        least = min(held.values(), default=0.0)
        return [f"{format_layers(held)}: {sentence.format(budget.ceiling, budget.value, least)}"] if held else []
    shares = {
        layer.layer: layer.limit * layer.held_out_rel_mse / layer.held_out_mse
        for layer in length.layers
        if budget.kind == "mse" and layer.held_out_mse > 0 and layer.why_dense is None
    }
    loose = {layer: share for layer, share in shares.items() if share > LOOSE}
    sentence = f"this mse is up to {max(loose.values(), default=0.0):.1%} of the output's mean square, where "
    sentence += f"{LOOSE:.1%} is much: --ceiling-rel-mse limits that"
    return [f"{format_layers(loose)}: {sentence}"] if loose else []


def list_closing_notes(report: Report) -> list[str]:
    """List the sentences about all lengths together. An indented one belongs to the one before it."""
    errors, seconds = [], []
    for length, layer in ((at, layer) for at in report.lengths for layer in at.layers):
        where = f"layer {layer.layer} at {length.length} tokens"
        if (error := layer.predicted_error) is not None and layer.limit:
            errors.append((abs(layer.error - error) / layer.limit, f"{where}: {error:.2e}, held out {layer.error:.2e}"))
        if (predicted := layer.predicted_seconds) and layer.seconds is not None:
            text = f"{where}: {predicted * 1e3:.3g} ms, measured {layer.seconds * 1e3:.3g} ms"
            seconds.append((abs(layer.seconds - predicted) / predicted, text))
    furthest = ["error by {:.0%} of the limit ({})".format(*max(errors))] if errors else []
    furthest += ["time by {:.0%} ({})".format(*max(seconds))] if seconds else []
    notes = [f"furthest from what was predicted: {', '.join(furthest)}"] if furthest else []
    if report.failed_trials:
        notes.append(f"{report.failed_trials} of {report.trials} trials failed and were left out:")
        by_count = sorted(report.failures.items(), key=lambda item: -item[1])
        notes += [f"  {count}x {shorten(reason, SHOWN_REASON)}" for reason, count in by_count]
    return notes


def format_layers(numbers: Iterable[int]) -> str:
    """Format layers' numbers: [0, 1, 2, 5] -> "layers 0-2, 5" """
    text = format_ranges(sorted(numbers))
    return f"layer {text}" if text.isdigit() else f"layers {text}"
