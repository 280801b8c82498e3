"""The tables of a report and the sentences below them, the same on the terminal and in the Markdown file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import fmean
from textwrap import shorten

from calibrate.report.contents import LayerReport, LengthReport, Report
from calibrate.report.shown import tau_range, times, two_digits
from calibrate.report.summary import ratio
from calibrate.tables import Number, Table, formatted, integer, kept_of
from s2o_runtime.fields import counted

DETAILS = ("tails", "repr.", "tile", "binds")  # columns that the terminal leaves to the report
BINDS = {"mse": "mse", "rel_mse": "rel", None: "-"}  # which limit of a layer is the smaller one
LOOSE = 5e-3  # of its output's mean square; a budget in mse that allows a layer more is pointed out
SHOWN_REASONS = 3  # of all for which no layer gains anything
WORTHWHILE = 1.05  # times dense's speed
GAIN_MORE = "Allow more error, or calibrate for longer prompts (--lengths)."
SHOWN_REASON = 110  # characters of a failed trial's reason; the JSON file has all of them


def gain(report: Report) -> str:
    """How many layers run S2O, what is gained at each length, and at what error; or why nothing is.

    Prefill is measured on a GPU; elsewhere attention's time is predicted, at the lengths that are calibrated.
    """
    layers = [layer for length in report.lengths for layer in length.layers]
    sparse = {layer.layer for layer in layers if layer.representatives}
    total = counted(len({layer.layer for layer in layers}), "full-attention layer")
    if not sparse:
        reasons = Counter(layer.why_dense for layer in layers if layer.why_dense).most_common()
        shown = [f"{reason} ({count}x)" for reason, count in reasons[:SHOWN_REASONS]]
        shown += [f"{len(reasons) - SHOWN_REASONS} more below"] if len(reasons) > SHOWN_REASONS else []
        return f"S2O runs in none of {total}, so nothing is gained: {'; '.join(shown)}. {GAIN_MORE}"
    measured = all(length.attention_seconds is not None for length in report.lengths)
    ratios = {
        length.length: ratio(length.dense_prefill_seconds, length.prefill_seconds)
        if measured
        else ratio(1.0, length.cost)
        for length in report.lengths
    }
    gains = ", ".join(f"{gained:.2f}x at {length}" for length, gained in ratios.items() if gained)
    what, how = ("prefill", "") if measured else ("attention", " (predicted)")
    text = f"S2O runs in {len(sparse)} of {total}; {what} speedup {gains} tokens{how}; {_kept(report)}."
    poor = max(filter(None, ratios.values()), default=1.0) < WORTHWHILE
    return f"{text} That is hardly worth deploying. {GAIN_MORE}" if poor else text


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
        f"dense {length.dense_prefill_seconds * 1e3:.1f} ms ({speedup})",
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
