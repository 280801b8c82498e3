"""s2o-profile: look into profiles, compare them, prove them again, draw them and pass them on.

A record is foreign: anything in it may be missing, or not what it should be.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from calibrate.cli import BAD_INPUT, INTERRUPTED, NOT_PROVEN, OK, Parser
from s2o_runtime import __version__
from s2o_runtime.errors import ConfigError, InputError, S2OError

if TYPE_CHECKING:
    from calibrate.recipe import Recipe
    from calibrate.search import Curves
    from s2o_runtime.config import HeadConfig, LayerConfig
    from s2o_runtime.profile import Profile

HUB = "hf://"
BESIDE = ("report.md", "report.json", "density.png", "frontier.png", "time.png")  # what a calibration writes too
WIDTH = 120


def parser() -> argparse.ArgumentParser:
    out = Parser(
        prog="s2o-profile",
        description="Look into S2O profiles, compare them, prove them again, draw them and pass them on.",
        epilog="Exit codes: 0 done, 2 bad input, 3 the proof failed.",
    )
    out.add_argument("--version", action="version", version=f"s2o {__version__}")
    commands = out.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, *places: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        for place in places:
            made.add_argument(place, metavar=place.upper(), type=str if place in ("model", "to", "source") else Path)
        made.add_argument("--json", action="store_true", help="print the result as JSON")
        return made

    show = command("show", "What a profile does and what was proven of it.", "profile")
    show.add_argument("--head", type=_head, metavar="LAYER.HEAD", help="what one head does at every length, and why")
    show.add_argument("--journal", type=Path, metavar="FILE", help="the measurements (default: beside the profile)")
    command("diff", "What differs between two profiles.", "a", "b")
    export = command("export", "Everything in a profile as JSON.", "profile")
    export.add_argument("--out", type=Path, metavar="FILE.json", help="default: standard output")
    verify = command("verify", "Prove a profile on held-out prompts here.", "model", "profile")
    verify.add_argument("--device", metavar="NAME", help="cuda, cuda:1 or cpu (default: a GPU if there is one)")
    verify.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="where the recipe's prompts are")
    plot = command("plot", "A picture of every head's threshold.", "profile")
    plot.add_argument("--out", type=Path, metavar="FILE.png", help="default <profile>.tau.png")
    command("push", "Copy a profile and its report to a folder or hf://org/name.", "profile", "to")
    pull = command("pull", "Fetch a profile and its report from a folder, a file or hf://org/name.", "source")
    pull.add_argument("--out", type=Path, metavar="FOLDER", default=Path(), help="default: here")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        return int(COMMANDS[args.command](args))
    except S2OError as error:
        return _fail(BAD_INPUT, str(error))
    except OSError as error:
        return _fail(BAD_INPUT, f"{error.filename or 'a file'} cannot be written or read ({error.strerror or error})")
    except KeyboardInterrupt:
        return _fail(INTERRUPTED, "interrupted")


def _fail(code: int, sentence: str) -> int:
    print(f"s2o-profile: {' '.join(sentence.split())}", file=sys.stderr)
    return code


def _head(text: str) -> tuple[int, int]:
    layer, dot, head = text.partition(".")
    if not (dot and layer.isascii() and head.isascii() and layer.isdigit() and head.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a layer and a head: try 3.7")
    return int(layer), int(head)


def show(args: argparse.Namespace) -> int:
    """The summary of a profile, or one head of it."""
    from s2o_runtime.profile import load_profile

    profile = load_profile(args.profile)
    if args.head is not None:
        return _show_head(args, profile)
    found = summary(profile)
    if args.json:
        return _print_json(found)
    for name in ("model", "architecture", "device", "budget", "objective", "proof"):
        _print(f"{name:<12}  {found[name] or 'not recorded'}")
    for problem in found["problems"]:
        _print(f"not proven: {problem}")
    if found["retiled"]:
        _print(f"{found['retiled']}")
    names = ("length", "tau", "dense heads", "tails", "density", "of", "error / limit", "worst row", "needles", "KL")
    _print_table("", names, [_length_cells(row) for row in found["lengths"]])
    _print(f"prompts below {profile.min_length} tokens stay dense")
    return OK


def summary(profile: Profile) -> dict[str, Any]:
    """What a profile says of itself, as JSON; None where its record is silent."""
    record, geometry = profile.record, profile.geometry
    kind, value, scope = (_at(record, "budget", name) for name in ("kind", "value", "scope"))
    problems = _at(record, "problems")
    buckets = zip(profile.lengths, profile.layers, strict=True)
    return {
        "model": profile.model_name,
        "architecture": str(geometry),
        "fingerprint": profile.fingerprint,
        "device": str(profile.device),
        "budget": None if _number(value) is None else f"{kind} {value:g} ({scope})",
        "objective": _at(record, "objective"),
        "proof": _at(record, "proof"),
        "problems": [str(each) for each in problems] if isinstance(problems, list) else [],
        "retiled": _at(record, "retiled", "note"),
        "lengths": [_length(profile, length, bucket) for length, bucket in buckets],
    }


def _length(profile: Profile, length: int, bucket: Sequence[LayerConfig]) -> dict[str, Any]:
    heads = [head for layer in bucket for head in layer.heads]
    sparse = [head for head in heads if head.mode == "s2o"]
    source, densities = _densities(profile, length)
    proof = _entry(profile, "held_out", length)
    kind = "rel_mse" if _at(profile.record, "budget", "kind") == "rel_mse" else "mse"
    shares = [
        None if limit is None or error is None or not limit else error / limit
        for error, limit in zip(_column(proof, kind), _column(proof, "limit"), strict=False)
    ]
    return {
        "length": length,
        "tau_min": min((head.tau for head in sparse), default=None),
        "tau_max": max((head.tau for head in sparse), default=None),
        "heads": len(heads),
        "dense_heads": len(heads) - len(sparse),
        "tails": sum(head.tail for head in sparse),
        "density": fmean(densities) if densities else None,
        "density_is": source,
        "layer_densities": densities,
        "error_over_limit": max((share for share in shares if share is not None), default=None),
        "worst": max((each for each in _column(proof, "worst") if each is not None), default=None),
        "needles": _at(proof, "needles"),
        "kl": _number(_at(proof, "kl")),
        "top1": _number(_at(proof, "top1")),
    }


def _length_cells(row: Mapping[str, Any]) -> list[str]:
    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    tau = "-" if row["tau_min"] is None else f"{row['tau_min']:.2g} .. {row['tau_max']:.2g}"
    needles = row["needles"]
    return [
        str(row["length"]),
        tau,
        f"{row['dense_heads']} of {row['heads']}",
        str(row["tails"]),
        shown(row["density"], ".3f"),
        row["density_is"] or "-",
        shown(row["error_over_limit"], ".0%"),
        shown(row["worst"], ".2g"),
        f"{needles[0]} of {needles[1]}" if isinstance(needles, list) and len(needles) == 2 else "-",
        shown(row["kl"], ".1e"),
    ]


def _densities(profile: Profile, length: int) -> tuple[str | None, list[float]]:
    """Each layer's density and whether it is "held out" or "predicted"; nothing where the record does not say."""
    for name in ("held_out", "predicted"):
        column = [each for each in _column(_entry(profile, name, length), "density") if each is not None]
        if len(column) == profile.geometry.layers:
            return name.replace("_", " "), column
    return None, []


def _entry(profile: Profile, name: str, length: int) -> Any:
    entries = _at(profile.record, name)
    found = (each for each in entries if _at(each, "length") == length) if isinstance(entries, list) else iter(())
    return next(found, None)


def _column(entry: Any, name: str) -> list[float | None]:
    layers = _at(entry, "layers")
    return [_number(_at(layer, name)) for layer in layers] if isinstance(layers, list) else []


def _at(value: Any, *path: str) -> Any:
    """What stands at a path of names, None if there is no such place."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _show_head(args: argparse.Namespace, profile: Profile) -> int:
    layer, head = args.head
    geometry = profile.geometry
    if layer >= geometry.layers or head >= geometry.query_heads:
        raise ConfigError(
            f"head {layer}.{head} does not exist: layers are 0 to {geometry.layers - 1}, heads 0 to "
            f"{geometry.query_heads - 1}"
        )
    found = explain_head(profile, args.profile, layer, head, args.journal)
    if args.json:
        return _print_json({"layer": layer, "head": head, "lengths": found})
    for row in found:
        _print(f"{row['length']} tokens: {_settings(row)}")
        if row["density"] is not None:
            _print(f"  predicted density {row['density']:.3f}, error {row['error']:.2e} {row['unit']}")
        _print(f"  {row['why']}")
    return OK


def explain_head(
    profile: Profile, path: Path, layer: int, head: int, journal: Path | None = None
) -> list[dict[str, Any]]:
    """A head's settings at every length, what its curve predicts of them, and what keeps it from being cheaper.

    Without the journal beside the profile, or without a curve in it, the reason says so.
    """
    from calibrate.rebudget import opened, recipe_of, stored_curves

    measured: dict[int, Curves] = {}
    missing = "the journal has no curve of this length and tile, so what it costs is not known"
    recipe: Recipe | None = None
    try:
        recipe = recipe_of(profile, path)
        with opened(journal or recipe.journal_path, profile, recipe) as kept:
            entries = kept.entries("curves")
        for length in set(profile.lengths) & set(recipe.lengths):
            config = profile.layers[profile.lengths.index(length)][layer]
            curves = stored_curves(entries, layer, length, config, profile, recipe)
            if curves:
                measured[length] = curves
    except InputError as error:
        missing = f"its curve is not there: {error}"
    rows = []
    for length, bucket in zip(profile.lengths, profile.layers, strict=True):
        config, settings = bucket[layer], bucket[layer].heads[head]
        row = {"length": length, **asdict(settings), "grain": config.grain, "tile": str(config.tile)}
        row |= {"density": None, "error": None, "unit": None}
        if settings.mode == "dense" and config.is_dense:
            why = "dense because its whole layer is: no head gains anything, or the layer was not faster than dense"
        elif recipe is None or length not in measured:
            why = missing
        else:
            found, why = _limits(measured[length], config, head, recipe)
            row |= found
        rows.append(row | {"why": why})
    return rows


def _limits(curves: Curves, config: LayerConfig, head: int, recipe: Recipe) -> tuple[dict[str, Any], str]:
    """Density and error of a head as its curve predicts them, and what keeps it from the next cheaper setting."""
    from calibrate.allocate import Point, points_of
    from calibrate.curves import Shape
    from calibrate.search import allowed, budget_mse, methods

    of_method = methods(curves, config.heads[0].segment, config.grain, Shape.of(config.tile))
    power = next(iter(of_method.values())).dense_power
    what = allowed(recipe)
    guarded = points_of(of_method, head, what)
    free = points_of(of_method, head, replace(what, worst_rows=None))
    here = next((point for point in guarded if _alike(point.head, config.heads[head])), None)
    if here is None:
        return {}, "its setting is none that its curve was measured at (it was tightened, or taken from other lengths)"

    def error(point: Point) -> str:
        return f"{recipe.budget.error(point.mse, power):.2e}"

    def cheaper(points: Iterable[Point]) -> Point | None:
        return next((point for point in points if point.cost < here.cost), None)

    unit = recipe.budget.kind
    spend = recipe.budget.error(budget_mse(curves, recipe), power)
    after, unguarded = cheaper(guarded), cheaper(free)
    parts = []
    if unguarded is None:
        parts.append("no setting that was measured is cheaper")
    elif after is None or unguarded.mse < after.mse:
        parts.append(
            f"held back by the guard on worst rows: {_point(unguarded)} would have an error of {error(unguarded)}, but "
            f"in one row tile of a hundred a row off by {unguarded.worst:.2g}, {recipe.worst_rows:g} is allowed"
        )
    if after is not None:
        of = "the layer" if recipe.scope == "layer" else "all layers in the mean"
        parts.append(
            f"limited by the budget: the next setting, {_point(after)}, would raise its error from {error(here)} to "
            f"{error(after)}, and {of} may spend {spend:.2e} {unit} in the mean over heads, of which others make more"
        )
    found = {"density": here.density, "error": recipe.budget.error(here.mse, power), "unit": unit}
    why = "; ".join(parts)
    return found, f"dense because {why}" if here.head.mode == "dense" else why


def _alike(one: HeadConfig, other: HeadConfig) -> bool:
    """Whether two settings are the same once tau has been rounded to float32."""
    if one.mode == other.mode == "dense":
        return True
    return replace(one, tau=other.tau) == other and abs(one.tau - other.tau) <= 1e-6 * other.tau


def _point(point: Any) -> str:
    head = point.head
    tail = " with a tail" if head.tail else ""
    return f"tau {head.tau:g}{tail} (repr. {head.representatives}, density {point.density:.3f})"


def _settings(row: Mapping[str, Any]) -> str:
    if row["mode"] == "dense":
        return "dense"
    tail = ", tail" if row["tail"] else ""
    return (
        f"tau {row['tau']:.3g} ({row['threshold']}), segment {row['segment']}, repr. {row['representatives']}{tail}, "
        f"grain {row['grain']}, tile {row['tile']}"
    )


def diff(args: argparse.Namespace) -> int:
    """What differs between two profiles."""
    from s2o_runtime.profile import load_profile

    found = differences(load_profile(args.a), load_profile(args.b))
    if args.json:
        return _print_json(found)
    if not any(found.values()):
        _print("the profiles are the same")
        return OK
    _print_table("fields", ("field", "a", "b"), [[n, _short(a), _short(b)] for n, (a, b) in found["fields"].items()])
    for name, lengths in found["lengths"].items():
        if lengths:
            _print(f"lengths in {name.removeprefix('only_')} only: {', '.join(map(str, lengths))}")
    rows = [
        [
            str(row["length"]),
            str(row["layer"]),
            str(row["heads"]),
            ", ".join(f"{name} {count}" for name, count in row["changed"].items()),
            *("-" if each is None else f"{each:.3f}" for each in row["densities"]),
        ]
        for row in found["layers"]
    ]
    _print_table("layers", ("length", "layer", "heads that differ", "in", "density a", "density b"), rows)
    return OK


def differences(a: Profile, b: Profile) -> dict[str, Any]:
    """Fields (what made the profiles), lengths that only one has, and layers whose settings differ."""
    common = [length for length in a.lengths if length in b.lengths]
    lengths = {
        f"only_{name}": sorted(set(one.lengths) - set(other.lengths)) for name, one, other in (("a", a, b), ("b", b, a))
    }
    same_shape = (a.geometry.layers, a.geometry.query_heads) == (b.geometry.layers, b.geometry.query_heads)
    return {
        "fields": dict(_changed_fields(_described(a), _described(b))),
        "lengths": lengths if any(lengths.values()) else {},
        "layers": [row for length in common for row in _changed_layers(a, b, length)] if same_shape else [],
    }


def _described(profile: Profile) -> dict[str, Any]:
    from s2o_runtime.profile import described

    record = {
        name: _at(profile.record, name) for name in ("budget", "objective", "proof", "recipe", "versions", "data")
    }
    document = described(profile)
    return {"model": document["model"], "device": document["device"], **record}


def _changed_fields(a: Any, b: Any, name: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for each in dict.fromkeys([*a, *b]):
            yield from _changed_fields(a.get(each), b.get(each), f"{name}.{each}".lstrip("."))
    elif a != b:
        yield name, (a, b)


def _changed_layers(a: Profile, b: Profile, length: int) -> Iterator[dict[str, Any]]:
    """How many heads of each layer differ, and in what; a tile or grain counts for the layer."""
    (_, of_a), (_, of_b) = _densities(a, length), _densities(b, length)
    rows = zip(a.layers[a.lengths.index(length)], b.layers[b.lengths.index(length)], strict=True)
    for layer, (one, other) in enumerate(rows):
        pairs = [(asdict(x), asdict(y)) for x, y in zip(one.heads, other.heads, strict=True)]
        changed = Counter(name for x, y in pairs for name in x if x[name] != y[name])
        whole = [name for name in ("tile", "row_reduce", "grain") if getattr(one, name) != getattr(other, name)]
        densities = [found[layer] if found else None for found in (of_a, of_b)]
        if changed or whole or densities[0] != densities[1]:
            yield {
                "length": length,
                "layer": layer,
                "heads": sum(x != y for x, y in pairs),
                "changed": dict(changed) | dict.fromkeys(whole, 1),
                "densities": densities,
            }


def export(args: argparse.Namespace) -> int:
    """Everything in a profile as JSON."""
    from s2o_runtime.profile import load_profile, write_atomically

    document = exported(load_profile(args.profile))
    if args.out is None:
        return _print_json(document)
    write_atomically(args.out, (json.dumps(document, indent=1) + "\n").encode())
    return _print_json({"out": str(args.out)}) if args.json else _said(f"wrote {args.out}")


def exported(profile: Profile) -> dict[str, Any]:
    """A profile as JSON: the fields of the file's document, and `buckets` with every layer in place of the tensors."""
    from s2o_runtime.profile import described

    buckets = [
        {"length": length, "layers": [asdict(layer) for layer in bucket]}
        for length, bucket in zip(profile.lengths, profile.layers, strict=True)
    ]
    document = described(profile)
    record = document.pop("record")
    return document | {"buckets": buckets, "record": record}


@dataclass(frozen=True)
class Verified:
    """A proof made again. layers: length, layer, error, limit; problems: one sentence each, none if it holds;
    same_prompts: whether the prompts are those in the profile's record."""

    lengths: list[dict[str, Any]]
    problems: list[str]
    same_prompts: bool


def verify(args: argparse.Namespace) -> int:
    """Prove a profile on held-out prompts on this machine."""
    from calibrate.cli import named_device

    name, _ = named_device(args.device)
    found = verified(args.model, args.profile, name, args.prompts)
    if args.json:
        _print_json(asdict(found))
    else:
        rows = [
            [
                str(length["length"]),
                f"{max(layer['error'] for layer in length['layers']):.2e}",
                f"{max(layer['error'] / layer['limit'] if layer['limit'] else 0.0 for layer in length['layers']):.0%}",
                f"{fmean(layer['density'] for layer in length['layers']):.3f}",
                "-" if length["needles"] is None else "{} of {}".format(*length["needles"]),
                f"{length['kl']:.1e}",
            ]
            for length in found.lengths
        ]
        _print_table("proven here", ("length", "largest error", "error / limit", "density", "needles", "KL"), rows)
        if not found.same_prompts:
            _print("the prompts are not those the profile was proven on")
    if found.problems:
        return _fail(NOT_PROVEN, f"the proof failed ({'; '.join(found.problems)})")
    return OK


def verified(model: str, path: Path, device: str, prompts: Path | None = None) -> Verified:
    """The held-out proof of a profile, as its recipe has it, of `model` on `device`.

    Raises InputError if its record does not say how it was made, if it is of another model or its tiles of another GPU.
    """
    import torch

    from calibrate.models import load, load_tokenizer
    from calibrate.pipeline import lost_needles, over_limit
    from calibrate.prompts import load_prompts
    from calibrate.rebudget import recipe_of
    from calibrate.verify import prove
    from s2o_runtime.gpu import Rejected, fit, identify
    from s2o_runtime.profile import load_profile

    profile = load_profile(path)
    recipe = replace(recipe_of(profile, path), model=model, device=device)
    recipe = replace(recipe, prompts=prompts or recipe.prompts)
    if recipe.scope == "model" and not _at(profile.record, "held_out"):
        raise InputError(f"{path} does not say what each layer may have of the model's budget: calibrate with it")
    verdict = fit(profile.device, identify(torch.device(device)))
    if isinstance(verdict, Rejected) or verdict.tiles != "profile":
        raise InputError(f"{path} cannot be proven here: {verdict.reason}")
    data = load_prompts(recipe, load_tokenizer(model, random_weights=recipe.random_weights))
    loaded = load(model, device, random_weights=recipe.random_weights, seed=recipe.seed)
    difference = loaded.geometry.difference(profile.geometry)
    if difference or loaded.fingerprint != profile.fingerprint:
        raise InputError(f"{path} is not of {model}, which has {difference or 'other weights'}: calibrate this model")
    proofs = prove(
        loaded, data.held_out, lambda length, layer: profile.layer_config(layer, length), lambda *_: None, lambda: None
    )
    lengths: list[dict[str, Any]] = []
    for length, proof in sorted(proofs.items()):
        recorded = _column(_entry(profile, "held_out", length), "limit")
        limits = recorded if len(recorded) == len(proof.layers) else [None] * len(proof.layers)
        layers = [
            {
                "layer": index,
                "error": layer.error(recipe.budget),
                "limit": recipe.budget.value if limit is None else limit,
                "density": layer.density,
                "dense": profile.layer_config(index, length).is_dense,
            }
            for index, (layer, limit) in enumerate(zip(proof.layers, limits, strict=True))
        ]
        lengths.append(
            {"length": length, "kl": proof.kl, "top1": proof.top1, "needles": proof.needles, "layers": layers}
        )
    problems = [
        over_limit(length["length"], layer["layer"], layer["error"], layer["limit"])
        for length in lengths
        for layer in length["layers"]
        if layer["error"] > layer["limit"] and not layer["dense"]
    ]
    problems += lost_needles(proofs, recipe).values()
    same = data.record()["held_out"] == _at(profile.record, "data", "held_out")
    return Verified(lengths, problems, same)


def plot(args: argparse.Namespace) -> int:
    """A heat map of every head's threshold at every length."""
    from s2o_runtime.profile import load_profile, write_atomically

    profile = load_profile(args.profile)
    out = args.out or args.profile.with_suffix(".tau.png")
    write_atomically(out, drawn(profile))
    return _print_json({"out": str(out)}) if args.json else _said(f"wrote {out}")


def drawn(profile: Profile) -> bytes:
    """A PNG: layers x heads for each length, coloured by tau, a cross on every dense head. Raises InputError without
    matplotlib."""
    try:
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise InputError("a picture needs matplotlib: pip install matplotlib") from error
    from calibrate.curves import TAUS
    from calibrate.plots import BAR, COLOURS, DPI, panels_of, whole_numbers

    figure = Figure(layout="constrained")
    norm = LogNorm(TAUS[0], TAUS[-1], clip=True)  # 0 is at its lower end
    lengths = [{"length": length, "calibrated": True} for length in profile.lengths]
    panels = panels_of(figure, lengths, (5.0, 4.0), "head", "layer")
    for (axes, _), bucket in zip(panels, profile.layers, strict=True):
        taus = [[math.nan if h.mode == "dense" else max(h.tau, TAUS[0]) for h in layer.heads] for layer in bucket]
        image = axes.imshow(taus, norm=norm, cmap=COLOURS, aspect="auto", interpolation="nearest")
        dense = [(x, y) for y, layer in enumerate(bucket) for x, head in enumerate(layer.heads) if head.mode == "dense"]
        axes.scatter([x for x, _ in dense], [y for _, y in dense], marker="x", color="black", lw=0.8, s=12)
        whole_numbers(axes.xaxis, axes.yaxis)
    figure.colorbar(image, ax=[axes for axes, _ in panels], label="tau (cross: dense head)", **BAR)
    figure.suptitle(f"{profile.model_name} on {profile.device}", fontsize="medium", parse_math=False)
    file = BytesIO()
    figure.savefig(file, format="png", dpi=DPI)
    return file.getvalue()


def push(args: argparse.Namespace) -> int:
    """Copy a profile and the report beside it to a folder or a Hub repository."""
    from s2o_runtime.profile import load_profile

    load_profile(args.profile)
    files = _with_report(args.profile)
    if args.to.startswith(HUB):
        hub, repository = _hub(), _repository(args.to)[0]
        with _hub_errors(args.to):
            api = hub.HfApi()
            api.create_repo(repository, exist_ok=True)
            changes = [hub.CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=str(file)) for file in files]
            api.create_commit(repository, operations=changes, commit_message=f"Add {args.profile.name}")
        return _say_copied(args, [f"{HUB}{repository}/{file.name}" for file in files])
    return _say_copied(args, [str(file) for file in _copy(files, Path(args.to))])


def pull(args: argparse.Namespace) -> int:
    """Fetch a profile and the report beside it; a file that is no profile is not written."""
    from s2o_runtime.profile import load_profile

    with tempfile.TemporaryDirectory() as temporary:
        source = Path(args.source)
        if args.source.startswith(HUB):
            repository, name = _repository(args.source)
            stem = Path(name).stem if name else "*"
            patterns = [f"{stem}.safetensors", *(f"{stem}.{each}" for each in BESIDE)]
            with _hub_errors(args.source):
                _hub().snapshot_download(repository, local_dir=temporary, allow_patterns=patterns)
            source = Path(temporary) / name if name else Path(temporary)
        profile = _only_profile(source, args.source)
        load_profile(profile)
        return _say_copied(args, [str(file) for file in _copy(_with_report(profile), args.out)])


def _only_profile(source: Path, name: str) -> Path:
    if not source.is_dir():
        return source
    found = sorted(source.glob("*.safetensors"))
    if len(found) != 1:
        which = ", ".join(file.name for file in found[:5]) or "none"
        raise InputError(f"{name} holds {len(found)} profiles ({which}): name one, as in {name.rstrip('/')}/FILE")
    return found[0]


def _with_report(profile: Path) -> list[Path]:
    """The files that belong together, the profile last: whoever sees it sees its card too."""
    beside = [profile.with_name(f"{profile.stem}.{each}") for each in BESIDE]
    return [*(file for file in beside if file.is_file()), profile]


def _copy(files: Sequence[Path], folder: Path) -> list[Path]:
    from s2o_runtime.profile import write_atomically

    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        write_atomically(folder / file.name, file.read_bytes())
    return [folder / file.name for file in files]


def _repository(address: str) -> tuple[str, str]:
    """hf://org/name or hf://org/name/file -> ("org/name", file or "")."""
    parts = address.removeprefix(HUB).rstrip("/").split("/")
    if not 2 <= len(parts) <= 3 or not all(parts):
        raise ConfigError(f"{address} is no Hub repository: use {HUB}org/name")
    return "/".join(parts[:2]), "".join(parts[2:])


def _hub() -> Any:
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise InputError(f"{HUB} needs huggingface_hub: pip install huggingface_hub, or use a folder") from error
    return huggingface_hub


@contextmanager
def _hub_errors(address: str) -> Iterator[None]:
    """What the Hub refuses, or a network that is not there, as one sentence."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, S2OError):
            raise
        raise InputError(f"{address} cannot be reached: {str(error).strip().splitlines()[0]}") from error


def _say_copied(args: argparse.Namespace, files: list[str]) -> int:
    return _print_json({"files": files}) if args.json else _said(*(f"wrote {file}" for file in files))


def _said(*lines: str) -> int:
    for line in lines:
        _print(line)
    return OK


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 36 else f"{text[:34]}.."


def _print_json(value: Any) -> int:
    print(json.dumps(value, indent=1))
    return OK


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH)


def _print(line: str) -> None:
    """One line as it is; a foreign text's control characters are left out."""
    from rich.control import strip_control_codes

    plain = "".join(each if each.isprintable() else " " for each in strip_control_codes(line))
    _console().print(plain, highlight=False, markup=False, soft_wrap=True)


def _print_table(title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(Text("".join(each if each.isprintable() else " " for each in cell)) for cell in row))
    _console().print(table)


COMMANDS = {
    "show": show,
    "diff": diff,
    "export": export,
    "verify": verify,
    "plot": plot,
    "push": push,
    "pull": pull,
}

if __name__ == "__main__":
    sys.exit(main())
