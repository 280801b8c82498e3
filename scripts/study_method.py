#!/usr/bin/env python3
"""What each extension of the paper's method is worth on a model.

    python scripts/study_method.py [--model demo] [--lengths 8192,32768,131072] [--out FILE.json]
    python scripts/study_method.py --plot FILE.json --out FILE.svg

Every variant of the method runs over a grid of taus, on one prompt of each length, in every layer. The tables say:
what density each variant needs for the same error, how far the error of one tau drifts over the lengths and over the
keys of a tile, how good the orders are beside the best one, and what density the model needs to find needles.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench_attention import PLOT_TYPES, tile_of
from benching import bench_parser, exact_rows, exit_code, numbers, parsed

from calibrate.cli import Parser
from calibrate.needles import make_needles
from s2o_runtime.attention import Backend, s2o_attention
from s2o_runtime.config import LayerConfig, Threshold, TileConfig
from s2o_runtime.errors import ConfigError, InputError
from s2o_runtime.gpu import default_tile, identify
from s2o_runtime.profile import Profile, write_atomically
from s2o_runtime.ranking import log_weights, order_of, part_means

FORMAT = "s2o-study-method/1"
TARGETS = (1e-2, 1e-3, 1e-4)  # rel_mse at which densities are compared
ORDER_TARGET = 1e-3  # rel_mse at which orders are compared, and near which one tau's drift is printed
PLOTTED_TARGETS = tuple(10.0 ** (exponent / 6) for exponent in range(-27, -5))  # 3e-5 .. 1e-1, six a decade
RAW_TAUS, OTHER_TAUS = (1e-6, 10**1.5), (1e-3, 1e3)  # ends of the grids; a raw tau must fall as prompts grow
CHECKED = ("paper", "rest", "all")  # variants that also run with other tiles
CHECKED_KEYS = (32, 64)  # keys of a tile (BN) there
ORDER_ROWS = 128  # rows of a tile whose best order is known, and keys between two looks at its error
NEEDLES = 8
TINY = 1e-30  # stands for an error of zero in logarithms


@dataclass(frozen=True)
class Variant:
    """A way to run S2O; the fields are those of HeadConfig and LayerConfig."""

    threshold: Threshold = "rest"
    representatives: int = 1
    tail: bool = False
    grain: int = 1

    def config(self, heads: int, tau: float, segment: int, tile: TileConfig) -> LayerConfig:
        return LayerConfig.uniform(heads, tau=tau, segment=segment, tile=tile, **asdict(self))

    def taus(self, per_decade: int) -> tuple[float, ...]:
        """The grid, ascending; both ends belong to it."""
        low, high = (math.log10(end) for end in (RAW_TAUS if self.threshold == "raw" else OTHER_TAUS))
        steps = round((high - low) * per_decade)
        return tuple(float(f"{10 ** (low + (high - low) * step / steps):.4g}") for step in range(steps + 1))


VARIANTS = {
    "paper": Variant(threshold="raw"),
    "share": Variant(threshold="share"),
    "rest": Variant(),
    "+r": Variant(representatives=32),
    "+tail": Variant(tail=True),
    "all": Variant(representatives=32, tail=True),
    "all, grain 4": Variant(representatives=32, tail=True, grain=4),
}
ORDERS = {
    "r=1": Variant(),
    "r=32": Variant(representatives=32),
    "r=32, grain 4": Variant(representatives=32, grain=4),
}
ORACLE = "oracle"


@dataclass(frozen=True)
class Curve:
    """Density and error of every head of the model, layer after layer, at every tau: both float64 [taus, heads]."""

    length: int
    variant: str
    tile: str
    taus: tuple[float, ...]
    density: Tensor
    rel_mse: Tensor

    def record(self) -> dict[str, Any]:
        head = {"length": self.length, "variant": self.variant, "tile": self.tile, "taus": list(self.taus)}
        return head | {"density": _short(self.density), "rel_mse": _short(self.rel_mse)}

    @classmethod
    def of(cls, record: dict[str, Any]) -> Curve:
        """The curve that `record` wrote."""
        numbers = (torch.tensor(record[name], dtype=torch.float64) for name in ("density", "rel_mse"))
        return cls(record["length"], record["variant"], record["tile"], tuple(record["taus"]), *numbers)


def parser() -> Parser:
    out, add = bench_parser("study_method", __doc__)
    lengths, taus = (partial(numbers, number) for number in (int, float))
    add("--model", "demo", "an alias, a local folder, or a hub id", metavar="NAME")
    add("--lengths", "8192,32768,131072", type=parsed(lengths, "8192,32768"), metavar="N,N")
    add("--variants", list(VARIANTS), nargs="+", choices=VARIANTS, metavar="NAME")
    add("--per-decade", 2, "taus in a decade of the grids", type=int, metavar="N")
    out.add_argument("--taus", type=parsed(taus, "1e-3,1,1e3"), metavar="X,X", help="these instead of the grids")
    add("--segment", 512, "queries that share a ranking", type=int, metavar="N")
    form = "BMxBNxCHUNK:WARPS:STAGES[:ws]"
    out.add_argument("--tile", type=parsed(tile_of, "128x64x4:8:3"), metavar=form, help="default by the GPU")
    add("--rows", 512, "query rows of a prompt where errors are measured", type=int, metavar="N")
    add("--order-segments", 6, "segments of a head whose orders are compared; 0 for none", type=int, metavar="N")
    add("--needle-length", 32768, type=int, metavar="N")
    add("--needle-prompts", 8, f"prompts with {NEEDLES} needles each", type=int, metavar="N")
    out.add_argument("--no-check", action="store_true", help="leave out other tiles")
    out.add_argument("--no-needles", action="store_true", help="leave out needles")
    add("--seed", 0, "seed of the prompts and of the rows", type=int, metavar="N")
    add("--device", "cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    out.add_argument("--plot", type=Path, metavar="FILE.json", help="plot what an earlier call wrote instead")
    out.add_argument("--out", type=Path, metavar="FILE", help="default build/study_method.json (--plot: .svg)")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    out = args.out or Path("build/study_method").with_suffix(".svg" if args.plot else ".json")
    work = (lambda: plot(read(args.plot), out)) if args.plot else (lambda: study(args, out))
    return exit_code("study_method", out, work, "shorter --lengths")


@torch.no_grad()
def study(args: argparse.Namespace, out: Path) -> None:
    """Measure, print the tables, and write what there is so far to `out` after each part."""
    from calibrate.models import load, load_config, load_tokenizer
    from calibrate.prompts import load_prompts
    from calibrate.recipe import Budget, Recipe
    from calibrate.versions import now, versions

    _check(args)
    args.variants = list(dict.fromkeys(args.variants))
    settings = {"num_prompts": 1, "held_out": 1, "seed": args.seed, "device": args.device}
    recipe = Recipe(args.model, Budget("rel_mse", ORDER_TARGET), args.lengths, out, **settings).validate()
    limit = int(load_config(args.model).max_position_embeddings)
    recipe.check_limit(limit)
    if args.needle_length > limit and not args.no_needles:
        raise ConfigError(
            f"--needle-length {args.needle_length} is beyond the model's limit of {limit}: use a shorter one"
        )
    device = identify(torch.device(args.device))
    tokenizer = load_tokenizer(args.model)
    prompts = load_prompts(recipe, tokenizer)
    ids = {length: prompts.calibration[length][0].ids for length in args.lengths}
    rng = random.Random(f"{args.seed}/needles")
    count = 0 if args.no_needles else args.needle_prompts
    exams = [Exam.make(tokenizer, args.needle_length, rng) for _ in range(count)]
    loaded = load(args.model, args.device, resident=None if args.no_needles else True)
    tile = args.tile or (default_tile(loaded.geometry.head_dim, device.capability) if args.device == "cuda" else None)
    args.tile = tile or TileConfig()
    record: dict[str, Any] = {
        "format": FORMAT,
        "date": now(),
        "device": asdict(device),
        "versions": versions(),
        "model": {"name": loaded.name, "fingerprint": loaded.fingerprint, **asdict(loaded.geometry)},
        "settings": {name: value for name, value in vars(args).items() if name not in ("plot", "out", "tile")},
        "tile": asdict(args.tile),
        "tile_name": str(args.tile),
        "prompts": [{"length": length, "sha256": prompts.calibration[length][0].sha256} for length in args.lengths],
        "variants": {name: asdict(VARIANTS[name]) for name in args.variants},
        "rel_mse": "of a head: mean squared error on the sampled rows over the mean square of dense attention there, "
        "which is computed in float32 on the same q, k, v",
    }

    curves, record["ordering"] = measure(loaded, ids, args)
    main = [curve for curve in curves if curve.tile == record["tile_name"]]
    record["curves"] = [curve.record() for curve in curves]
    record["density_at"] = densities(main, TARGETS)
    record["drift"] = drifts(main)
    record["tiles"] = tile_effects(curves)
    _write(record, out)
    print_tables(record)
    if exams:
        record["needles"] = find_needles(loaded, exams, args)
        _write(record, out)
        print_needles(record["needles"])


def measure(
    loaded: Any, ids: Mapping[int, Tensor], args: argparse.Namespace
) -> tuple[list[Curve], list[dict[str, Any]]]:
    """The curves of every length, variant and tile, and what the orders of every length need; layer after layer."""
    from tqdm import tqdm

    from calibrate.capture import layers

    points: dict[tuple[int, str, TileConfig], list[tuple[Tensor, Tensor]]] = {}
    needed: dict[int, list[dict[str, Tensor]]] = {length: [] for length in ids}
    orders = {name: order.config(1, 0.0, args.segment, args.tile) for name, order in ORDERS.items()}
    total = len(ids) * loaded.geometry.layers
    with tqdm(total=total, desc="measuring", unit="layer", disable=not sys.stderr.isatty()) as bar:
        for captured in layers(loaded, list(ids.values())):
            for length, inputs in zip(ids, captured, strict=True):
                k, v = inputs.k, inputs.v
                q = inputs.q * (inputs.scale * inputs.q.shape[3] ** 0.5)  # from here on the scale is the usual one
                rows, exact = exact_rows(q, k, v, args.rows, args.seed)
                for name, tile in _runs(args, length):
                    found = [_point(q, k, v, config, rows, exact) for config in _configs(args, name, tile, q.shape[1])]
                    density, error = (torch.stack(each) for each in zip(*found, strict=True))
                    points.setdefault((length, name, tile), []).append((density, error))
                if args.order_segments and length >= 2 * args.segment:
                    needed[length].append(ordering_quality(q, k, v, orders, segments=args.order_segments))
                bar.update()
    curves = []
    for (length, name, tile), of_layers in points.items():
        density, error = (torch.cat(each, 1) for each in zip(*of_layers, strict=True))
        curves.append(Curve(length, name, str(tile), _taus(args, VARIANTS[name]), density, error))
    ordering = [
        {"length": length, "order": name} | _share_of(torch.cat([each[name] for each in of_layers], 1))
        for length, of_layers in needed.items()
        for name in (of_layers[0] if of_layers else ())
    ]
    return curves, ordering


def _runs(args: argparse.Namespace, length: int) -> list[tuple[str, TileConfig]]:
    """The variants and tiles that run at a length; the shortest one is enough for other tiles."""
    runs = [(name, args.tile) for name in args.variants]
    if args.no_check or length != args.lengths[0]:
        return runs
    others = check_tiles(args.tile)
    return runs + [(name, tile) for name in args.variants if name in CHECKED for tile in others]


def check_tiles(tile: TileConfig) -> list[TileConfig]:
    """Plain tiles that check their stop as often and for as many rows, with fewer keys in a tile."""
    plain = replace(tile, specialized=False, num_stages=2)
    others = (replace(plain, block_n=keys, chunk=tile.stride // keys) for keys in CHECKED_KEYS)
    return [other for other in others if other.block_n != tile.block_n and other.stride == tile.stride]


def _taus(args: argparse.Namespace, variant: Variant) -> tuple[float, ...]:
    return args.taus or variant.taus(args.per_decade)


def _configs(args: argparse.Namespace, name: str, tile: TileConfig, heads: int) -> list[LayerConfig]:
    variant = VARIANTS[name]
    return [variant.config(heads, tau, args.segment, tile) for tau in _taus(args, variant)]


def _point(q: Tensor, k: Tensor, v: Tensor, config: LayerConfig, rows: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Density and rel_mse of every head of a layer, float64 [Hq] each."""
    backend: Backend = "triton" if q.is_cuda else "reference"
    out, stats = s2o_attention(q, k, v, config, backend=backend, return_stats=True)
    squared = (out[:, :, rows].float() - exact).square().mean((0, 2, 3))
    return stats.density.double().cpu(), (squared / exact.square().mean((0, 2, 3))).double().cpu()


def density_at(curve: Curve, target: float) -> tuple[Tensor, Tensor, Tensor]:
    """The lowest density of every head with an error of at most `target`: density, unreached, lowest; [heads] each.

    Between two taus it is interpolated, log on log. Heads that never reach the target are `unreached` and count 1.0;
    those that are within it at the largest tau are `lowest`, and could perhaps do with less.
    """
    met = curve.rel_mse <= target
    taus = len(curve.taus)
    last = taus - 1 - met.flip(0).int().argmax(0)
    pair = torch.stack([last, (last + 1).clamp_max(taus - 1)])
    density, error = (each.clamp_min(TINY).log().gather(0, pair) for each in (curve.density, curve.rel_mse))
    unreached, lowest = ~met.any(0), met[-1]
    step = torch.where(lowest, 1.0, error[1] - error[0])
    between = (density[0] + (math.log(target) - error[0]) / step * (density[1] - density[0])).exp()
    return torch.where(unreached, 1.0, torch.where(lowest, curve.density[-1], between)), unreached, lowest


def densities(curves: Iterable[Curve], targets: Sequence[float]) -> list[dict[str, Any]]:
    """A row for each length, variant and target: the mean density, and its ratio to the paper's if that is there."""
    rows: list[dict[str, Any]] = []
    papers: dict[tuple[int, float], float] = {}
    for curve in sorted(curves, key=lambda curve: (curve.length, curve.variant != "paper")):
        for target in targets:
            density, unreached, lowest = density_at(curve, target)
            mean = float(density.mean())
            if curve.variant == "paper":
                papers[curve.length, target] = mean
            paper = papers.get((curve.length, target))
            row = {"length": curve.length, "variant": curve.variant, "rel_mse": target, "density": mean}
            row |= {"of_paper": mean / paper if paper else None}
            rows.append(row | {"unreached": int(unreached.sum()), "lowest": int(lowest.sum())})
    return rows


def drifts(curves: Iterable[Curve]) -> list[dict[str, Any]]:
    """For each variant and tau, the mean error at every length and the largest ratio between two of them."""
    return _drifts(curves, "length")


def tile_effects(curves: Iterable[Curve]) -> list[dict[str, Any]]:
    """The same between the tiles of the variants that ran with several, at the length where they did."""
    of: dict[tuple[int, str], list[Curve]] = {}
    for curve in curves:
        of.setdefault((curve.length, curve.variant), []).append(curve)
    return [row for group in of.values() if len(group) > 1 for row in _drifts(group, "tile")]


def _drifts(curves: Iterable[Curve], over: str) -> list[dict[str, Any]]:
    rows: dict[tuple[str, float], dict[str, Any]] = {}
    for curve in curves:
        for tau, density, error in zip(curve.taus, curve.density.mean(1), curve.rel_mse.mean(1), strict=True):
            row = rows.setdefault((curve.variant, tau), {"variant": curve.variant, "tau": tau, "at": []})
            row["at"].append({over: getattr(curve, over), "rel_mse": float(error), "density": float(density)})
    for row in rows.values():
        for name in ("rel_mse", "density"):
            values = [max(at[name], TINY) for at in row["at"]]
            row[f"{name}_ratio"] = max(values) / min(values)
    return list(rows.values())


def near(rows: Sequence[dict[str, Any]], variant: str, target: float) -> dict[str, Any]:
    """Of a variant's drifts, the one whose errors lie nearest to `target`."""

    def distance(row: dict[str, Any]) -> float:
        return abs(sum(math.log(max(at["rel_mse"], TINY) / target) for at in row["at"]) / len(row["at"]))

    return min((row for row in rows if row["variant"] == variant), key=distance)


@dataclass(frozen=True)
class _Rows:
    """Some query rows and the prefix of their segment. Weights are exp(score - largest score of the row)."""

    weights: Tensor  # [P, R]
    v: Tensor  # [P, D]
    l: Tensor  # [R], the sum of the window's weights
    acc: Tensor  # [R, D], the window's weights times values
    exact: Tensor  # [R, D], dense attention

    def tile(self, begin: int, end: int) -> _Rows:
        weights = self.weights[:, begin:end]
        return _Rows(weights, self.v, self.l[begin:end], self.acc[begin:end], self.exact[begin:end])

    def log_mass(self) -> Tensor:
        """What the keys of the prefix really weigh, the mean over the rows' softmaxes: [P]."""
        return (self.weights / (self.weights.sum(0) + self.l)).mean(1).log()


def ordering_quality(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    configs: Mapping[str, LayerConfig],
    *,
    segments: int = 6,
    target: float = ORDER_TARGET,
) -> dict[str, Tensor]:
    """The share of the prefix each order must visit before the error stays within `target`: float64 [2, Hq].

    q: [1, Hq, L, D]; k, v: [1, Hkv, L, D], L at least two segments. Entry 0 is without a tail, entry 1 with it.
    configs: names and what ranks, the first head's segment and representatives and the layer's grain; all of one
        segment. "oracle" comes with them: every tile visits its keys by their true mass in it.
    Looked at are tiles of 128 rows of `segments` segments spread over the sequence, in float32, one head and one
    segment at a time: memory grows with a segment's scores. Each tile stops by itself and as early as it may, so this
    is about orders only, not about thresholds.
    """
    heads, length, head_dim = q.shape[1:]
    segment = next(iter(configs.values())).heads[0].segment
    size = math.gcd(ORDER_ROWS, segment)
    begins = _spread(length, segment, segments)
    keys = {name: torch.zeros(2, heads, dtype=torch.float64) for name in (*configs, ORACLE)}
    for head in range(heads):
        kv = head // (heads // k.shape[1])
        of_head, keys_of, values_of = q[0, head].float() * head_dim**-0.5, k[0, kv].float(), v[0, kv].float()
        for begin in begins:
            queries, end = of_head[begin : begin + segment], begin + segment
            rows = _rows(queries, keys_of[:end], values_of[:end])
            for name, config in configs.items():
                parts = part_means(queries, segment // config.heads[0].representatives)
                mass = log_weights(parts, keys_of[:begin], config.grain)
                keys[name][:, head] += keys_needed(rows, mass, config.grain, size, target).mean(1).cpu()
            tiles = [rows.tile(first, first + size) for first in range(0, segment, size)]
            best = [keys_needed(tile, tile.log_mass(), 1, size, target) for tile in tiles]
            keys[ORACLE][:, head] += torch.cat(best, 1).mean(1).cpu()
    return {name: needed / sum(begins) for name, needed in keys.items()}


def _spread(length: int, segment: int, count: int) -> list[int]:
    """Where `count` whole segments that have a prefix begin, from the first to the last."""
    places = torch.linspace(1, length // segment - 1, count, dtype=torch.float64)
    return [segment * place for place in sorted(set(places.round().int().tolist()))]


def _rows(queries: Tensor, k: Tensor, v: Tensor) -> _Rows:
    """The last rows of a sequence, scaled; they are its window."""
    length, begin = len(k), len(k) - len(queries)
    scores = k @ queries.T
    position = torch.arange(length, device=k.device)
    scores[begin:].masked_fill_(position[begin:, None] > position[begin:], float("-inf"))
    weights = scores.sub_(scores.amax(0)).exp_()
    window = weights[begin:]
    exact = weights.T @ v / weights.sum(0)[:, None]
    return _Rows(weights[:begin], v[:begin], window.sum(0), window.T @ v[begin:], exact)


def keys_needed(rows: _Rows, log_mass: Tensor, grain: int, size: int, target: float) -> Tensor:
    """Keys after which the rel_mse of every tile of `size` rows stays within `target`: float64 [2, tiles]."""
    powers = rows.exact.square().mean(1).view(-1, size).mean(1)
    errors = errors_along(rows, log_mass, grain, size)
    over = errors.view(*errors.shape[:2], -1, size).mean(-1) > target * powers
    steps = over.shape[1]
    needed = torch.where(over.any(1), steps + 1 - over.flip(1).int().argmax(1), 1)
    return (needed.clamp_max(steps) * size).double()


def errors_along(rows: _Rows, log_mass: Tensor, grain: int, step: int) -> Tensor:
    """Mean squared error of every row after every `step` keys of an order, without and with a tail: [2, P / step, R].

    log_mass: [P / grain], by which `grain` adjacent keys are ordered and the tail is estimated, in any unit. The tail
    is that of `s2o_runtime.reference.with_tail` for chunks of `step` keys, as if the visit ended there.
    """
    order = order_of(log_mass, grain)
    steps = len(order) // step
    weights = rows.weights[order].view(steps, step, -1)
    v = rows.v[order].view(steps, step, -1)
    brought = weights.sum(1)
    l = brought.cumsum(0) + rows.l
    acc = (weights.transpose(1, 2) @ v).cumsum(0) + rows.acc
    heavy = ((log_mass - log_mass.amax()).exp() / grain)[order // grain].view(steps, 1, step)
    mass = heavy.sum((1, 2))
    left, values = _after(mass), _after((heavy @ v)[:, 0])
    most = torch.arange(steps - 1, -1, -1, device=l.device)  # as if every key left brought as much
    added = (torch.where(mass * most > left, left / mass, most) * (left > 0))[:, None] * brought
    mean = values / torch.where(left > 0, left, 1.0)[:, None]
    plain = (acc / l[..., None] - rows.exact).square_().mean(-1)
    acc += added[..., None] * mean[:, None]
    return torch.stack([plain, (acc / (l + added)[..., None] - rows.exact).square_().mean(-1)])


def _after(terms: Tensor) -> Tensor:
    """Sums over what comes after each entry of the first dimension."""
    return torch.cat([terms[1:].flip(0).cumsum(0).flip(0), torch.zeros_like(terms[:1])])


def _share_of(needed: Tensor) -> dict[str, Any]:
    """What `ordering_quality` found for all heads of the model [2, heads], as numbers."""
    plain, tail = needed.mean(1).tolist()
    return {"share": plain, "share_with_tail": tail, "of_heads": _short(needed)}


@dataclass(frozen=True)
class Exam:
    """A prompt of needles that asks for them at its end. ids: [L]; codes: where each code's tokens stand."""

    ids: Tensor
    codes: list[range]

    @classmethod
    def make(cls, tokenizer: Any, length: int, rng: random.Random) -> Exam:
        from calibrate.prompts import encode, source_text

        needles = make_needles(NEEDLES, rng)
        end: list[int] = []
        codes: list[range] = []
        for needle in rng.sample(needles, len(needles)):
            end += encode(tokenizer, needle.question)
            codes.append(range(len(end), len(end) + len(encode(tokenizer, needle.code))))
            end += encode(tokenizer, needle.answer)
        facts = [encode(tokenizer, needle.fact) for needle in needles]
        if length < len(end) + 2 * sum(map(len, facts)):
            raise ConfigError(f"--needle-length {length} is too short for {NEEDLES} needles: use a longer one")
        ids = source_text(tokenizer, length - len(end), rng)
        for index, fact in enumerate(facts):
            place = (index + 1) * len(ids) // (NEEDLES + 1)
            ids[place : place + len(fact)] = fact
        start = len(ids)
        return cls(torch.tensor(ids + end), [range(start + code.start, start + code.stop) for code in codes])

    def answered(self, model: Any) -> list[list[bool]]:
        """Of every code, which tokens the model predicts when it is given those before."""
        asked = len(self.ids) - self.codes[0].start + 1
        ids = self.ids.to(model.device)
        logits = model(input_ids=ids[None], use_cache=False, logits_to_keep=asked).logits
        right = (logits[0, :-1].argmax(-1) == ids[1 - asked :]).tolist()  # entry 0 is the first code's first token
        first = self.codes[0].start
        return [right[code.start - first : code.stop - first] for code in self.codes]


def find_needles(loaded: Any, exams: list[Exam], args: argparse.Namespace) -> dict[str, Any]:
    """What share of needles and of their digits the model finds, dense and with every variant and tau, one a decade."""
    from tqdm import tqdm

    from calibrate.verify import patched
    from s2o_runtime.hf import layer_states

    taus = {name: args.taus or VARIANTS[name].taus(per_decade=1) for name in args.variants}
    settings = [(name, tau) for name in taus for tau in taus[name]]
    rows = []
    for name, tau in tqdm(settings, desc="needles", unit="setting", disable=not sys.stderr.isatty()):
        config = VARIANTS[name].config(loaded.geometry.query_heads, tau, args.segment, args.tile)
        with patched(loaded.model, uniform_profile(loaded, config, args.needle_length)):
            shares, found = [], []
            for exam in exams:
                found.append(exam.answered(loaded.model))
                last = (state.last for state in layer_states(loaded.model))
                shares += [1.0 if stats is None else float(stats.density.mean()) for stats in last]
        rows.append({"variant": name, "tau": tau, "density": sum(shares) / len(shares)} | _grades(found))
    dense = _grades([exam.answered(loaded.model) for exam in exams])
    return {"length": args.needle_length, "prompts": len(exams), "needles": NEEDLES, "dense": dense, "rows": rows}


def uniform_profile(loaded: Any, config: LayerConfig, length: int) -> Profile:
    """The profile of a model that treats every layer and head alike, for prompts of `length` tokens."""
    device = identify(loaded.weights.device)
    layers = ((config,) * loaded.geometry.layers,)
    return Profile(loaded.name, loaded.geometry, loaded.fingerprint, device, (length,), layers).validate()


def _grades(found: list[list[list[bool]]]) -> dict[str, float]:
    codes = [code for prompt in found for code in prompt]
    digits = [digit for code in codes for digit in code]
    return {"found": sum(map(all, codes)) / len(codes), "digits": sum(digits) / len(digits)}


def print_tables(record: dict[str, Any]) -> None:
    """All but the needles: densities and orders of every length, and what one tau means elsewhere."""
    variants, lengths, heads = record["variants"], record["settings"]["lengths"], len(record["curves"][0]["density"][0])
    for length in lengths:
        rows = {(row["variant"], row["rel_mse"]): row for row in record["density_at"] if row["length"] == length}
        lines = [("variant", *(f"rel_mse {target:.0e}" for target in TARGETS))]
        lines += [(name, *(_density(rows[name, target]) for target in TARGETS)) for name in variants]
        title = f"{length} tokens, tile {record['tile_name']}: mean density of {heads} heads, its ratio to the paper's"
        print_table(f"{title}\n(!N: N heads never reach the error, _N: N are within it at the largest tau)", lines)
        orders = [row for row in record["ordering"] if row["length"] == length]
        if orders:
            lines = [("order", "share of the prefix", "with a tail")]
            lines += [(row["order"], f"{row['share']:.4f}", f"{row['share_with_tail']:.4f}") for row in orders]
            print_table(f"{length} tokens: what an order must visit for rel_mse {ORDER_TARGET:.0e}", lines)
    for key, over in (("drift", "length"), ("tiles", "tile")):
        drift = record[key]
        if drift and len(drift[0]["at"]) > 1:
            lines = [("variant", "tau", *(str(at[over]) for at in drift[0]["at"]), "rel_mse ratio", "density ratio")]
            for name in dict.fromkeys(row["variant"] for row in drift):
                row = near(drift, name, ORDER_TARGET)
                errors = (f"{at['rel_mse']:.1e}" for at in row["at"])
                ratios = (f"{row[ratio]:.2f}" for ratio in ("rel_mse_ratio", "density_ratio"))
                lines.append((name, f"{row['tau']:.2g}", *errors, *ratios))
            print_table(f"rel_mse of one tau, that nearest to {ORDER_TARGET:.0e}, by {over}", lines)


def print_needles(needles: dict[str, Any]) -> None:
    lines = [("variant", "tau", "density", "needles", "digits")]
    for row in [{"variant": "dense", "tau": 0.0, "density": 1.0} | needles["dense"], *needles["rows"]]:
        shares = (f"{row[name]:.3f}" for name in ("density", "found", "digits"))
        lines.append((row["variant"], f"{row['tau']:.2g}", *shares))
    print_table("{prompts} prompts of {length} tokens with {needles} needles each".format(**needles), lines)


def _density(row: dict[str, Any]) -> str:
    text = f"{row['density']:.3f}" + (f" ({row['of_paper']:.2f}x)" if row["of_paper"] else "")
    return text + "".join(f" {mark}{row[name]}" for name, mark in (("unreached", "!"), ("lowest", "_")) if row[name])


def print_table(title: str, lines: Sequence[Sequence[str]]) -> None:
    """A heading and rows under it; aligned if rich is there."""
    try:
        from rich.console import Console
        from rich.table import Column, Table
    except ModuleNotFoundError:
        print(title, *("\t".join(line) for line in lines), sep="\n")
        return
    table = Table(*(Column(name, justify="right" if at else "left", no_wrap=True) for at, name in enumerate(lines[0])))
    for line in lines[1:]:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 150).print(title, table, sep="\n", highlight=False, soft_wrap=True)


def read(path: Path) -> dict[str, Any]:
    """A record that `study` wrote."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise InputError(f"{path} cannot be read ({reason}): give a file this script wrote") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise InputError(f"{path} is not of format {FORMAT}: give a file this script wrote")
    return record


LOOKS: dict[str, dict[str, Any]] = {
    "paper": {"color": "black", "ls": "--"},
    "share": {"color": "C7", "ls": "--"},
    "rest": {"color": "C0"},
    "+r": {"color": "C2"},
    "+tail": {"color": "C1"},
    "all": {"color": "C3", "lw": 2.2},
    "all, grain 4": {"color": "C4", "lw": 2.2, "ls": ":"},
}


def plot(record: dict[str, Any], out: Path) -> None:
    """Density against error, a panel for each length, and needles against density; one line for each variant."""
    from matplotlib.figure import Figure

    if out.suffix not in PLOT_TYPES:
        raise ConfigError(f"--out {out} is not a picture: end it in one of {PLOT_TYPES}")
    curves = [curve for curve in map(Curve.of, record["curves"]) if curve.tile == record["tile_name"]]
    lengths = sorted({curve.length for curve in curves})
    needles = record.get("needles")
    panels = len(lengths) + bool(needles)
    columns = math.ceil(math.sqrt(panels))
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(5.0 * max(columns, 1.2), 4.0 * rows + 0.9), layout="constrained")
    shared: Any = None
    for index, length in enumerate(lengths, 1):
        axes = figure.add_subplot(rows, columns, index, sharey=shared)
        shared = shared or axes
        of_length = {curve.variant: curve for curve in curves if curve.length == length}
        for name in record["variants"]:
            density = [float(density_at(of_length[name], target)[0].mean()) for target in PLOTTED_TARGETS]
            axes.plot(PLOTTED_TARGETS, density, label=name, **{"lw": 1.4} | LOOKS[name])
        axes.set(xscale="log", yscale="log", xlabel="rel_mse of every head", ylabel="mean density")
        axes.set_title(f"{length} tokens", fontsize="medium")
        _plain_numbers(axes.yaxis)
        axes.grid(alpha=0.3)
    if needles:
        _needle_panel(figure.add_subplot(rows, columns, panels), needles, record["variants"])
    handles, names = shared.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(7, len(names)))
    figure.suptitle(f"{record['model']['name']} on {record['device']['name']}", fontsize="medium")
    figure.savefig(out, dpi=120)


def _needle_panel(axes: Any, needles: dict[str, Any], variants: Iterable[str]) -> None:
    for name in variants:
        rows = sorted((row for row in needles["rows"] if row["variant"] == name), key=lambda row: row["density"])
        look = {"lw": 1.4, "marker": "o", "ms": 3.5} | LOOKS[name]
        axes.plot([row["density"] for row in rows], [row["found"] for row in rows], **look)
    axes.axhline(needles["dense"]["found"], color="grey", lw=0.8)
    axes.annotate(
        "dense", (1, needles["dense"]["found"]), (0, 3), xycoords=("axes fraction", "data"),
        textcoords="offset points", ha="right", fontsize="small", color="grey",
    )  # fmt: skip
    axes.set(xscale="log", xlabel="mean density", ylabel="needles found", ylim=(-0.03, 1.08))
    axes.set_title("{length} tokens, {prompts} prompts of {needles} needles".format(**needles), fontsize="medium")
    _plain_numbers(axes.xaxis)
    axes.grid(alpha=0.3)


def _plain_numbers(axis: Any) -> None:
    """0.05 instead of a power of ten."""
    from matplotlib.ticker import LogLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def _short(numbers: Tensor) -> Any:
    """Nested lists of numbers with as many digits as they are worth."""
    rows = numbers.tolist()
    return [[float(f"{number:.5g}") for number in row] for row in rows]


def _write(record: dict[str, Any], out: Path) -> None:
    write_atomically(out, (json.dumps(record) + "\n").encode())


def _check(args: argparse.Namespace) -> None:
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda is not here: use --device cpu")
    least = {"per_decade": 1, "rows": 1, "order_segments": 0, "needle_length": 1, "needle_prompts": 1}
    for name, lowest in least.items():
        if getattr(args, name) < lowest:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}: use at least {lowest}")
    if min(args.lengths) <= args.segment:
        raise ConfigError(f"length {min(args.lengths)} is no longer than --segment {args.segment}: use a longer one")


if __name__ == "__main__":
    sys.exit(main())
