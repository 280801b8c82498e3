"""The parts of docs/results.md about whole models and servers: rehearsals, server steps, short tails, paged caches."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.bench.paged import PagedFile
from scripts.bench.schema import RehearsalFile, RehearsalRow
from scripts.bench.serving import ModelledPrompt, ServingFile
from scripts.bench.tails import Chunked, Point, TailsFile
from scripts.docs.markdown import table
from scripts.docs.results_data import Source, missing

GIB = 1 << 30


def rehearsals(sources: Sequence[Source[RehearsalFile]]) -> list[str]:
    """Whole calibrations of models with random weights."""
    out = [
        "## Rehearsals",
        "Models of published sizes with random weights, calibrated from memory with a certificate, then patched. "
        "Random weights attend evenly: densities and KL are no trained model's. Peak is the GPU memory at most in"
        " use, weights included.",
    ]
    if not sources:
        return [*out, missing(RehearsalFile)]
    names = ("model", "weights", "tokens", "layers", "of other kinds", "density", "certified", "calibration", "peak")
    for source in sources:
        rows = [cells for row in source.file.rows for cells in _rehearsed(row)]
        out += [f"{source.link}. {source.note}".strip(), table(names, rows, "llr")]
    return out


def _rehearsed(row: RehearsalRow) -> list[list[str]]:
    full = row.layers.get("full_attention", 0)
    if row.failed is not None:
        return [[row.model, row.weights, "-", str(full), "-", "-", f"failed: {row.failed}", "-", "-"]]
    others = ", ".join(f"{count} {kind}" for kind, count in sorted(row.layers.items()) if kind != "full_attention")
    peak = max(row.peak_bytes.values(), default=0)
    return [
        [
            row.model,
            row.weights,
            str(entry.length),
            f"{entry.s2o_layers} of {full}",
            others or "none",
            f"{entry.density:.3f}",
            f"{'yes' if entry.certified else 'no'}, {entry.certify_prompts} prompts",
            f"{row.seconds['calibration']:.0f} s",
            f"{peak / GIB:.1f} GiB" if peak else "-",
        ]
        for entry in row.lengths
    ]


def serving(sources: Sequence[Source[ServingFile]]) -> list[str]:
    """Modelled server steps, and real servers where one was measured."""
    out = [
        "## Modelled server steps",
        "One layer's attention over all chunks of a prompt, through S2O's vLLM backend with the real kernels and "
        "a fake of vLLM's classes, behind what is cached of the prompt. Beside it torch's dense attention of the "
        "same chunks, and what they take at the rate of one whole prompt in cuDNN, which FlashAttention 3 in a "
        "server comes near; the speed-up is against the latter. Where all of a prompt's chunks go to the stock "
        "backend, which the fake does not have, there is no time.",
    ]
    if not sources:
        return [*out, missing(ServingFile)]
    names = ("tokens", "chunk", "cached", "density", "S2O", "torch's chunks", "at a whole prompt's rate", "speed-up")
    for source in sources:
        heads = f"{source.file.settings['heads'].replace(',', '/')} heads of {source.file.settings['head_dim']}"
        if source.file.modelled:
            rows = [_modelled(row) for row in source.file.modelled]
            out += [f"{heads}; {source.link}. {source.note}".strip(), table(names, rows, "r")]
        if source.file.served:
            columns = ("server", "tokens", "cached", "at a time", "first token", "tokens / s")
            rows = [
                [
                    row.label,
                    str(row.length),
                    f"{row.cached:.0%}",
                    str(row.concurrency),
                    f"{row.first_token_seconds * 1e3:.0f} ms",
                    f"{row.tokens_per_second:.0f}",
                ]
                for row in source.file.served
            ]
            out += [f"Real servers; {source.link}.", table(columns, rows, "lr")]
    return out


def _modelled(row: ModelledPrompt) -> list[str]:
    seconds = (row.s2o_seconds, row.dense_seconds, row.at_whole_rate_seconds)
    times = [f"{1e3 * value:.2f} ms" for value in seconds]
    faster = f"{row.at_whole_rate_seconds / row.s2o_seconds:.2f}x"
    if row.density == 1.0:
        times[0], faster = "stock backend", "-"
    return [str(row.length), str(row.chunk), f"{row.cached:.0%}", f"{row.density:.3f}", *times, faster]


def tails(sources: Sequence[Source[TailsFile]]) -> list[str]:
    """Few new tokens behind many keys."""
    out = [
        "## Short tails",
        "Dense attention's time over the op's for so many queries (rows) behind so many keys (columns), "
        "theirs included; in brackets that of S2O's kernels where the op went dense.",
    ]
    if not sources:
        return [*out, missing(TailsFile)]
    for source in sources:
        keys = sorted({point.keys for point in source.file.points})
        rows = []
        for queries in sorted({point.queries for point in source.file.points}):
            by_keys = {point.keys: point for point in source.file.points if point.queries == queries}
            rows.append([str(queries), *(_tail(by_keys.get(count)) for count in keys)])
        heads = f"{source.file.settings['heads'].replace(',', '/')} heads of {source.file.settings['head_dim']}"
        out += [f"{heads}; {source.link}. {source.note}".strip(), table(("queries", *map(str, keys)), rows, "r")]
        if source.file.chunks:
            out += _in_chunks(source.file.chunks)
    return out


def paged(sources: Sequence[Source[PagedFile]]) -> list[str]:
    """Keys in the pages of a cache."""
    out = [
        "## Paged caches",
        "The op on keys and values in shuffled pages, read where they lie or copied out of them first, and the op on "
        "keys that lie one behind another. The last column is the memory of a copy.",
    ]
    if not sources:
        return [*out, missing(PagedFile)]
    names = ("queries", "keys", "in place", "copied", "one behind another", "copied / in place", "copy")
    for source in sources:
        settings = source.file.settings
        heads = f"{settings['heads'].replace(',', '/')} heads of {settings['head_dim']}"
        heads += f", {settings['dense_heads']} of them dense" if settings["dense_heads"] else ""
        rows = [
            [
                str(point.queries),
                str(point.keys),
                *(
                    f"{1e3 * seconds:.3f} ms"
                    for seconds in (point.in_place_seconds, point.copy_seconds, point.contiguous_seconds)
                ),
                f"{point.copy_seconds / point.in_place_seconds:.2f}",
                f"{point.copy_bytes / 1e6:.0f} MB",
            ]
            for point in source.file.points
        ]
        out += [
            f"{heads}, pages of {settings['page_size']}; {source.link}. {source.note}".strip(), table(names, rows, "r")
        ]  # fmt: skip
    return out


def _in_chunks(chunks: Sequence[Chunked]) -> list[str]:
    """A prompt that is fed in chunks, against the prompt at once, which is the longest chunk."""
    whole = max(chunks, key=lambda entry: entry.chunk)
    rows = [
        [
            str(entry.chunk),
            f"{1e3 * entry.auto_seconds:.2f} ms",
            f"{entry.auto_seconds / whole.auto_seconds:.2f}",
            f"{1e3 * entry.dense_seconds:.2f} ms",
            f"{entry.dense_seconds / whole.dense_seconds:.2f}",
        ]
        for entry in chunks
    ]
    return [
        f"{whole.keys} tokens of the same inputs in chunks, all calls together, in time and over the prompt at once:",
        table(("chunk", "S2O", "over at once", "torch's dense attention", "over at once"), rows, "r"),
    ]


def _tail(point: Point | None) -> str:
    if point is None:
        return ""
    if point.backend != "dense" or not point.kernel_seconds:
        return f"{point.ratio:.2f}"
    return f"{point.ratio:.2f} ({point.kernel_ratio:.2f})"
