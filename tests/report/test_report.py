"""calibrate/report: the terminal, the page, the JSON file and the pictures say what the report says."""

import json
import re
from html.parser import HTMLParser
from io import StringIO
from typing import get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from calibrate.machine import MARK
from calibrate.record import Certificate, RecordNode
from calibrate.report import contents, figures, page, sections
from support.browser import PROGRAM, look_at
from support.pages import ROOT

BUDGET = 1e-3
SECONDS = ("seconds", "dense_seconds")
PARTS = {  # of a report, by the fields that hold them
    "budget": contents.BudgetReport,
    "certificate": Certificate,
    "journal": contents.JournalReport,
    "lengths": contents.LengthReport,
    "layers": contents.LayerReport,
    "heads": contents.HeadReport,
}
# of one length and three layers: one was left as it was, one got less of its budget, one became dense
CERTIFICATE = {
    "confidence": 0.95,
    "method": "bounds",
    "lengths": [
        {
            "length": 8192,
            "prompts": 19,
            "groups": 17,
            "tokens": 19 * 8192,
            "mean_kl": 1e-3,
            "retrieval": {"found": 32, "kept": 30, "low": 0.79, "high": 0.99},
            "domains": [
                {"domain": "code", "prompts": 10, "groups": 10, "kl": 1e-3, "error_over_limit": 0.4},
                {"domain": "prose", "prompts": 9, "groups": 7, "kl": 2e-3, "error_over_limit": 0.5},
            ],
            "layers": [
                {"mean": 5e-4, "bound": 8e-4, "density": 0.5, "limit": 1e-3},
                {"mean": 5e-4, "bound": 7e-4, "spent": 0.7, "density": 0.6, "limit": 1e-3},
                {"mean": 0.0, "bound": 0.0, "spent": 0.0, "density": 1.0, "limit": 1e-3},
            ],
        }
    ],
}


def made_layer(number, heads, length, on_gpu, dense):
    """A layer whose last head is dense, or with `dense` every head; others are the denser the shorter the prompt."""
    sparse = 0 if dense else heads - 1
    of_heads = [
        {"mode": "s2o" if head < sparse else "dense", "tau": 0.0047 * 3 ** (head % 9),
         "representatives": 16 if head % 3 else 1, "tail": ("mean", "none")[head % 2],
         "density": 3000 * (head + 1) / heads / length if head < sparse else 1.0, "cost": 0.3 + 0.01 * head,
         "error": BUDGET * (head + 1) / heads if head < sparse else 0.0}
        for head in range(heads)
    ]  # fmt: skip
    chosen, taus = ([head[name] for head in of_heads[:sparse]] for name in ("representatives", "tau"))
    mean = sum(head["density"] for head in of_heads) / heads
    error = 2e-7 if dense else BUDGET * (0.5 + 0.07 * number)
    dense_seconds = 2e-13 * length**2 * heads if on_gpu else None
    seconds = dense_seconds and dense_seconds * (mean if dense else mean / 0.8 + 0.05)
    return {
        "layer": number, "tau_min": min(taus, default=None), "tau_max": max(taus, default=None),
        "dense_heads": heads - sparse, "tails": sum(head["tail"] == "mean" for head in of_heads[:sparse]),
        "representatives": {str(count): chosen.count(count) for count in sorted(set(chosen))},
        "segment": 512, "lookback": 128, "tile": "64x128x16 ws s2",
        "why_dense": "no tile beats dense" if dense else None, "density": mean, "error": error, "limit": BUDGET,
        "error_over_limit": error / BUDGET, "predicted_error": 0.9 * error, "held_out_mse": error / 7,
        "held_out_rel_mse": error, "worst": 0.01 * number + 0.1, "tightened": int(number == 3),
        "predicted_seconds": seconds and 1.1 * seconds, "seconds": seconds, "dense_seconds": dense_seconds,
        "binds": None, "eighths": [error / BUDGET * (0.5 + 0.125 * eighth) for eighth in range(8)],
        "places": [9.5, 2.0, 1.2, 1.0, 0.9],
        "heads": of_heads, "frontier": [[1.0, 0.0], *([0.9 / 2**step, error * 2 ** (step - 4)] for step in range(9))],
    }  # fmt: skip


def made(layers=6, heads=8, lengths=(8192, 16384, 32768), on_gpu=True, checked=(16384,)):
    """A report as JSON, with made-up numbers that fit each other; layer 2 of the shortest length is dense."""
    rows = []
    for length in lengths:
        of_length = [made_layer(i, heads, length, on_gpu, (i, length) == (2, lengths[0])) for i in range(layers)]
        if length in checked:
            unknown = dict.fromkeys(("predicted_error", "predicted_seconds", "frontier", "why_dense"))
            of_length = [layer | unknown | {"heads": []} for layer in of_length]
        together = {name: sum(layer[name] for layer in of_length) if on_gpu else None for name in SECONDS}
        rows.append({
            "length": length, "calibrated": length not in checked, "kl": 1.25e-5, "top1": 0.99871,
            "needles": [11, 12], "prefill_seconds": 0.0141, "dense_prefill_seconds": 0.0282,
            "cost": None if length in checked else 0.4,
            "attention_seconds": together["seconds"], "dense_attention_seconds": together["dense_seconds"],
            "groups": [] if length in checked else [[0, 1], list(range(2, layers))], "layers": of_length,
        })  # fmt: skip
    return {
        "out": "profiles/demo/h200/rel-mse-0.001.safetensors", "met": True, "problems": [],
        "model": "demo", "architecture": "llama", "device": "NVIDIA H200 (sm_90, 132 SMs)" if on_gpu else "cpu",
        "random_weights": False, "budget": {"kind": "rel_mse", "unit": "rel_mse", "value": BUDGET, "ceiling": None},
        "worst_rows": 0.5,
        "calibration_seconds": 115.2, "phases": {"measuring": 35.4, "searching": 60.1, "proving": 19.7},
        "trials": 288, "failed_trials": 3, "failures": {"out of resource [shared memory]": 2, "a\nb" * 200: 1},
        "journal": {"path": "profiles/demo/h200/demo.journal.jsonl", "reused": 17},
        "versions": {"s2o": "0.1.0", "torch": "2.11.0"}, "seed": 5, "data": "prompts.jsonl", "lengths": rows,
        "command": "s2o-calibrate --model demo", "adjusted_on": 2, "certificate": None, "not_proven": [],
        "plan": {"model": "demo (given)", "objective": "measured <latency>"},
    }  # fmt: skip


def typed(value, cls=contents.Report):
    """The report that a value is the JSON of. A field that is missing or unknown is a TypeError."""
    if isinstance(value, list):
        return tuple(typed(item, cls) for item in value)
    if value is None or cls is None:
        return value
    if issubclass(cls, RecordNode):
        return cls.from_json(value)
    return cls(**{name: typed(item, PARTS.get(name)) for name, item in value.items()})


def write(summary, profile_path):
    """The files of a report, all of whose pictures can be drawn."""
    paths, failure = page.write_report(typed(summary), profile_path)
    assert failure == ""
    return paths


def printed(summary, width=120):
    """Return what the terminal shows."""
    console = Console(file=StringIO(), width=width)
    page.print_report(typed(summary), console)
    return console.file.getvalue()


def without(absent, value, cls=contents.Report):
    """The same with None wherever that may be and `absent` says so."""
    if isinstance(value, list):
        return [without(absent, item, cls) for item in value]
    if not isinstance(value, dict) or cls is None or issubclass(cls, RecordNode):
        return value
    may_be_none = {name for name, hint in get_type_hints(cls).items() if type(None) in get_args(hint)}
    return {
        name: None if name in may_be_none and absent() else without(absent, item, PARTS.get(name))
        for name, item in value.items()
    }


@pytest.fixture
def summary():
    return made()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return what is written of the report of `summary`, by name; tests only read it."""
    folder = tmp_path_factory.mktemp("report") / "new"
    return {path.name: path for path in write(made(), folder / "rel-mse-0.001.safetensors")}


def layers_of(summary):
    return [layer for length in summary["lengths"] for layer in length["layers"]]


def words(summary):
    """Return what the terminal shows, every space alike."""
    return " ".join(printed(summary, 140).split())


def test_a_layers_row_says_what_the_summary_says(summary):
    layer = summary["lengths"][0]["layers"][0]
    layer |= {"tau_min": 0.001468, "tau_max": 146.8, "dense_heads": 3, "tails": 16, "segment": 1024, "worst": 0.256}
    layer |= {"representatives": {"1": 20, "32": 8}, "tile": "128x128x16 ws s2", "density": 0.1234}
    layer |= {"error": 9.5e-4, "error_over_limit": 0.95, "seconds": 0.001, "dense_seconds": 0.0123}
    assert " 0 0.0015 .. 150 3 1024 0.123 9.50e-04 95% 0.26 12.30x " in words(summary)
    report = typed(summary)
    expected = "0 0.0015 .. 150 3 16 1/32: 20/8 1024 128x128x16 ws s2 0.123 9.50e-04 95% 0.26 12.30x"
    assert " ".join(sections.make_layer_table(report, report.lengths[0]).rows[0]) == expected


def test_tables_are_at_most_80_columns_and_complete():
    summary = made(layers=80, heads=64)
    for layer in summary["lengths"][0]["layers"]:
        layer |= {"tau_min": 0.0016, "tau_max": 0.0025, "dense_heads": 12, "representatives": {"1": 40, "32": 12}}
        layer |= {"tile": "128x128x16 ws s2", "segment": 65536, "worst": 0.0123, "dense_seconds": layer["seconds"] * 12}
    text = printed(summary, 80)
    tables = [line for line in text.splitlines() if "12.00x" in line or "──" in line]
    assert len(tables) == 80 + 4  # a rule for each length and the overview
    assert max(map(len, tables)) <= 80
    assert "0.0016 .. 0.0025    12" in text
    assert "…" not in text


def test_the_first_line_says_what_is_gained(summary, files):
    """On a GPU what was measured, elsewhere what is predicted, and where nothing is gained, why."""
    first = printed(summary).splitlines()[0]
    for part in (
        ": 5 of 6 at 8192, 6 of 6 at 16384, 6 of 6 at 32768 tokens; ", "error at most 85% of a layer's limit, ",
        "; prefill speedup 2.00x at 8192, 2.00x at 16384, 2.00x at 32768 tokens; ", "needles kept 33 of 36.",
    ):  # fmt: skip
        assert part in first, part
    assert sections.is_worthwhile(typed(summary))
    assert first in files["rel-mse-0.001.report.md"].read_text()
    on_cpu = printed(made(on_gpu=False))
    assert "; attention speedup 2.50x at 8192, 2.50x at 32768 tokens (predicted); error at most " in on_cpu
    assert ("(plain torch: no measure" in on_cpu, "plain torch" in printed(summary)) == (True, False)
    for length in summary["lengths"]:
        length["prefill_seconds"] = length["dense_prefill_seconds"] / 1.01
    assert "That is hardly worth deploying" in printed(summary)
    assert not sections.is_worthwhile(typed(summary))
    for layer in layers_of(summary):
        layer |= {"representatives": {}, "why_dense": f"reason {min(layer['layer'], 3)}"}
    assert "nothing is gained: reason 3 (9x); reason 0 (3x); reason 1 (3x); 1 more below." in words(summary)
    assert not sections.is_worthwhile(typed(summary))  # whatever its times say


def test_the_overview_has_the_largest_error(summary):
    for index, layer in enumerate(summary["lengths"][2]["layers"]):
        layer |= {"error": 1e-4 * (index + 1), "error_over_limit": 0.1 * (index + 1), "density": 0.1 * (index + 1)}
    summary["lengths"][2] |= {"attention_seconds": 1.0, "dense_attention_seconds": 2.5}
    assert " 32768 6.00e-04 60% 0.350 2.50x 2.00x 11 of 12 1.3e-05 " in words(summary)
    assert "all lengths" not in printed(summary | {"lengths": summary["lengths"][2:]})


def test_a_budget_in_mse_shows_both_units_and_the_limit_that_binds(summary):
    summary["budget"] = {"kind": "mse", "unit": "mse", "value": 1e-3, "ceiling": 1e-2}
    for layer in layers_of(summary):
        held = layer["layer"] in (0, 1, 3)
        layer |= {"error": 4e-4, "held_out_mse": 4e-4, "held_out_rel_mse": 8e-3 if held else 1e-3}
        layer |= {"limit": 5e-4 if held else 1e-3, "binds": "rel_mse" if held else "mse", "why_dense": None}
    report, text = typed(summary), words(summary)
    rows = sections.make_layer_table(report, report.lengths[0]).rows
    assert [(row[9], row[11]) for row in rows] == [
        ("8e-03", "rel") if layer in (0, 1, 3) else ("1e-03", "mse") for layer in range(6)
    ]
    note = "layers 0-1, 3: the ceiling, rel_mse 0.01, allows less than mse 0.001, down to an mse of 5.0e-04"
    assert text.count(note) == 3
    assert "8192 4.00e-04 8.00e-03" in text.partition("all lengths")[2]
    summary["budget"]["ceiling"] = None
    assert "layers 0-1, 3: this mse is up to 1.0% of the output's mean square" in words(summary)


def test_where_the_error_lies_is_shown_of_every_layer(files):
    card = files["rel-mse-0.001.report.md"].read_text()
    table = card.partition("\n## Where the error lies")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if re.match(r"\| \d", line)]
    shown = [[row["length"], layer["layer"]] for row in made()["lengths"] for layer in row["layers"]]
    assert [list(map(int, row[:2])) for row in rows] == shown
    assert rows[0][2:] == ["25%", "31%", "38%", "44%", "50%", "56%", "62%", "69%", "9.5", "2", "1.2", "1", "0.9"]


def test_failures_and_problems_are_at_the_end(summary):
    text = printed(summary | {"met": False, "problems": ["layer 3 at 8192 tokens is at 130% of its limit."]})
    title, most, foreign, problem = text.splitlines()[-4:]
    assert (title, most) == ("3 of 288 trials failed and were left out:", "  2x out of resource [shared memory]")
    assert re.fullmatch(r"  1x a ba ba.*\[\.\.\.\]", foreign)
    assert problem == "not proven: layer 3 at 8192 tokens is at 130% of its limit."


@pytest.mark.usefixtures("undrawn")
def test_what_is_certified_comes_first_and_what_is_not_proven_last(tmp_path):
    missing = "retrieval at 8192 tokens: the prompts ask for no needles"
    summary = made(layers=3, heads=2, lengths=(8192,)) | {"certificate": CERTIFICATE, "not_proven": [missing]}
    claims = (
        "Certified on 19 prompts of each length, of 17 groups of text (2 kinds in equal parts): with 95% confidence,",
        "over prose alone the largest is 50% of it, estimated from 9 prompts.",
        "8192 tokens: these prompts had a mean KL of 1.0e-03;",
        "30 of 32 needles kept (79% shown, 99% not refuted)",
        "1 layer got less of the budget than was adjusted, and 1 became dense",
        "how: bounds",
        "not proven: retrieval at 8192 tokens",
    )
    assert re.search(".*".join(map(re.escape, claims)), words(summary))  # in this order
    files = {path.name: path for path in write(summary, tmp_path / "p.safetensors")}
    assert json.loads(files["p.report.json"].read_text()) == {"origin": MARK} | summary
    page = files["p.report.md"].read_text()
    assert page.index(f"**{claims[0]}") < page.index("## Certified") < page.index("## Target against achieved")
    for row in (
        "| 8192 | 19 | 17 | 2 | 50% | 80% | 1.0e-03 | 30 of 32 |",
        "| code | 10 | 10 | 40% | 1.0e-03 |",
        f"- R{missing[1:]}.",
    ):
        assert row in page, row


def test_the_card_has_every_layer_and_refers_to_files_that_exist(summary, files):
    card = files["rel-mse-0.001.report.md"].read_text()
    plots = [f"rel-mse-0.001.{name}.png" for name in ("summary", "density", "frontier")]
    pages = [f"rel-mse-0.001.report.{suffix}" for suffix in ("json", "md", "html")]
    assert sorted(files) == sorted([*plots, *pages])
    assert re.findall(r"!\[\w+\]\((.*)\)", card) == plots
    assert json.loads(files["rel-mse-0.001.report.json"].read_text()) == {"origin": MARK} | summary
    for plot in plots:
        with Image.open(files[plot]) as picture:
            assert np.asarray(picture.convert("RGB")).astype(float).var() > 100, plot
    for length in summary["lengths"]:
        section = card.partition(f"\n## {length['length']} tokens")[2].partition("\n## ")[0]
        rows = [line.strip("| ").split(" | ") for line in section.splitlines() if re.match(r"\| \d", line)]
        assert [(row[0], row[7], row[8]) for row in rows] == [
            (str(layer["layer"]), f"{layer['density']:.3f}", f"{layer['error']:.2e}") for layer in length["layers"]
        ]
    for part in (
        's2o_runtime.patch(model, "profiles/demo/h200/rel-mse-0.001.safetensors")\n```',
        "```sh\ns2o-calibrate --model demo\n```", "Adjusted and checked on the same 2 prompts", "17 measurements",
        "| time | 115 s (measuring 35 s, searching 60 s, proving 20 s) |", "layers 0-1; layers 2-5",
        "| 16384 checked |", "- That 16384 tokens are served as well", "Prompts below 8192 tokens",
    ):  # fmt: skip
        assert part in card, part


def drawn(draw, summary):
    """The axes of a plot, a panel for each length first."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    draw(figure, typed(summary))
    return figure.axes


def test_the_heat_map_shows_densities_and_crosses_dense_heads(summary):
    panels = drawn(figures.draw_density, summary)[:2]
    assert [axes.get_title() for axes in panels] == ["8192 tokens", "32768 tokens"]
    for axes, length in zip(panels, summary["lengths"][::2], strict=True):  # nothing is known of a checked one's heads
        heads = [layer["heads"] for layer in length["layers"]]
        shown = axes.images[0].get_array()
        assert np.array_equal(shown, [[head["density"] for head in row] for row in heads])
        dense = {(x, y) for y, row in enumerate(heads) for x, head in enumerate(row) if head["mode"] == "dense"}
        assert {tuple(map(int, place)) for place in axes.collections[0].get_offsets()} == dense


def test_the_frontier_shows_curves_chosen_points_and_the_budget(summary):
    panels = drawn(figures.draw_frontier, summary)[:3]
    for axes, length in zip(panels, summary["lengths"], strict=True):
        lines = [line.get_xydata() for line in axes.lines if len(line.get_xdata())]
        assert lines[0][:, 1].tolist() == [BUDGET, BUDGET]
        points = [line[0].tolist() for line in lines if len(line) == 1]
        assert points == [[layer["density"], layer["error"]] for layer in length["layers"]]
        curves = [line.tolist() for line in lines[1:] if len(line) > 1]
        assert curves == [layer["frontier"][1:] for layer in length["layers"] if layer["frontier"]]
        low, high = axes.get_ylim()
        assert all(low < error < high for _, error in points)


def test_the_page_opens_with_what_is_gained_and_lost(summary, files, caplog):
    for name, table in (("md", "| length |"), ("html", "<table")):
        page = files[f"rel-mse-0.001.report.{name}"].read_text()
        assert page.index("Adjusted and checked on") < page.index("What is gained, and") < page.index(table)
    caplog.set_level("INFO")  # as --verbose: matplotlib says so of names that are numbers
    gain, layers, places = drawn(figures.draw_summary, summary)
    assert not caplog.records
    assert [tick.get_text() for tick in gain.get_xticklabels()] == [str(row["length"]) for row in summary["lengths"]]
    attention = [row["dense_attention_seconds"] / row["attention_seconds"] for row in summary["lengths"]]
    assert [bar.get_height() for bar in gain.patches] == pytest.approx([*attention, 2.0, 2.0, 2.0])
    *lines, limit = [list(line.get_ydata()) for line in layers.lines]
    assert lines == [[layer["error_over_limit"] for layer in row["layers"]] for row in summary["lengths"]]
    *of_places, allowed = [list(line.get_ydata()) for line in places.lines]
    worst = [np.max([layer["eighths"] for layer in row["layers"]], axis=0).tolist() for row in summary["lengths"]]
    assert (of_places, limit, allowed) == (worst, [1.0, 1.0], [1.5, 1.5])


def test_without_a_gpu_the_gain_is_predicted():
    on_cpu = made(on_gpu=False, lengths=(512, 1024, 2048), checked=(512,))
    assert re.search(r" 512 checked \S+ \S+ \S+ - 2\.00x .* 1024 \S+ \S+ \S+ 2\.50x predicted 2\.00x", words(on_cpu))
    gain = drawn(figures.draw_summary, on_cpu)[0]
    assert gain.get_legend_handles_labels()[1] == ["attention, predicted"]
    assert [text.get_text() for text in gain.texts] == ["-", "2.50x", "2.50x"]


def test_layers_have_their_own_numbers_and_different_colours():
    """In a model whose layers 5, 11 and 17 alone have full attention."""
    summary = made(layers=3, lengths=(8192,), checked=())
    for layer, number in zip(summary["lengths"][0]["layers"], (5, 11, 17), strict=True):
        layer["layer"] = number
    frontier, bar = drawn(figures.draw_frontier, summary)
    circles = [line.get_color() for line in frontier.lines if line.get_marker() == "o" and len(line.get_xdata())]
    mappable = bar._colorbar.mappable
    assert circles == [mappable.to_rgba(place) for place in range(3)]
    assert len(set(circles)) == 3
    density, layers = drawn(figures.draw_density, summary)[0], drawn(figures.draw_summary, summary)[1]
    for axis in (bar.yaxis, density.yaxis, layers.xaxis):
        assert axis.get_major_formatter().format_ticks([-1, 0, 1, 2, 3]) == ["", "5", "11", "17", ""]


def test_a_failed_run_on_a_cpu_has_a_whole_report(tmp_path):
    """Although all is None that may be, and every error is 0."""
    summary = without(lambda: True, made(lengths=(8192,))) | {"met": False, "random_weights": True}
    summary |= {"problems": ["layer 3 is over its limit."], "failed_trials": 0, "failures": {}}
    for layer in layers_of(summary):
        layer |= {"error": 0.0, "representatives": {}}
    assert "not proven: layer 3 is over its limit." in printed(summary)
    (tmp_path / "p.safetensors").touch()
    written = write(summary, tmp_path / "p.safetensors")
    assert len(written) == 6
    card = next(path for path in written if path.suffix == ".md").read_text()
    for part in (
        "**Not proven**: no profile was written", "- layer 3 is over its limit.", "A limit on the worst rows",
        "`p.safetensors` beside this file is of an earlier run", "the weights were random", "there was no GPU",
        "ask for none",
    ):  # fmt: skip
        assert part in card, part
    assert not re.search("## Use|None", card)


@pytest.fixture
def undrawn(monkeypatch):
    """For tests that do not look at pictures."""
    monkeypatch.setattr(figures, "_save_figure", lambda *_, **options: b"<svg></svg>")


@pytest.mark.usefixtures("undrawn")
def test_every_file_is_written_atomically(tmp_path, monkeypatch):
    taken = {}
    monkeypatch.setattr(page, "write_atomically", taken.__setitem__)
    written = write(made(2, 2, (8192,), checked=()), tmp_path / "a b.safetensors")
    assert list(tmp_path.iterdir()) == []
    assert sorted(taken) == sorted(written)
    *_, card, html = taken
    assert (card.name, html.name) == ("a b.report.md", "a b.report.html")  # the card comes after what it refers to
    assert "(a%20b.frontier.png)" in taken[card].decode()


class Structure(HTMLParser):
    """A page as a browser sees it: what is open, what cells say, and all that could be loaded from elsewhere."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.open, self.cells, self.loaded, self.ids = [], [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.loaded += [given[name] for name in ("src", "href", "xlink:href", "data", "action") if name in given]
        self.ids += [given["id"]] if "id" in given else []
        self.cells += [""] if tag in ("td", "th") else []
        if tag not in ("meta", "br", "img", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):  # of <a/> too, behind its start
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def assert_page_is_whole(page):
    """Every element is closed, every link leads to a place in the page, and nothing is loaded from elsewhere."""
    structure = Structure(page)
    assert structure.open == []
    assert len(structure.ids) == len(set(structure.ids))
    links = {target[1:] for target in structure.loaded if target.startswith("#")}
    assert links <= set(structure.ids)
    assert all(target.startswith(("#", "data:")) for target in structure.loaded)
    assert not re.search(r"url\((?!#|.?data:)|@import|fetch\(|XMLHttpRequest", page)
    assert "default-src 'none'" in page
    return "|".join(cell.strip() for cell in structure.cells)


def test_the_html_page_is_whole_and_says_what_the_report_does(files):
    page = files["rel-mse-0.001.report.html"].read_text()
    cells = assert_page_is_whole(page)
    assert page.count("<svg") == 4  # three of the summary; densities of heads are maps here
    assert "measured &lt;latency&gt;" in page
    assert "hardware|NVIDIA H200 (sm_90, 132 SMs)" in cells
    for layer in layers_of(made()):
        assert f"|{layer['tile']}|{layer['density']:.3f}|{layer['error']:.2e}|" in cells


@pytest.mark.usefixtures("undrawn")
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    random=st.randoms(use_true_random=False),
    share=st.sampled_from([0.1, 0.5]),
    foreign=st.text(st.characters(codec="utf-8", exclude_categories=["L"]), max_size=20),
)
def test_whatever_may_be_none_or_foreign_may_be(random, share, foreign, tmp_path):
    summary = without(lambda: random.random() < share, made(3, 2, (8192, 16384)) | {"certificate": CERTIFICATE})
    summary |= {"model": f"<b>|`{foreign}", "problems": [f"</p>\n# {foreign}"]}
    *_, markdown_path, html_path = write(summary, tmp_path / "p.safetensors")
    markdown, html = markdown_path.read_text("utf-8"), html_path.read_text("utf-8")
    assert not re.search(r"None|\bnan\b", printed(summary) + markdown)
    assert_page_is_whole(html)
    assert markdown.startswith("# S2O profile of \\<b\\>\\|\\`")
    assert not re.search(r"<b>|</p>|\n# ", markdown)


SITE = ROOT / "build" / "site" / "index.html"
BROKEN = """<!DOCTYPE html><meta name="viewport" content="width=device-width"><img src="missing.png" width=9 height=9>
<div style="overflow: hidden; width: 99px"><table><tr><td style="min-width: 200px">cut</table></div>
<div style="overflow: auto; width: 99px"><table><tr><td style="min-width: 200px">scrolls</table></div>
<p style="width: 3000px">wide</p><script>missing()</script>"""


NO_BROWSER = "there is no browser: install the system's package of chromium"


@pytest.mark.slow(reason="starts a browser")
@pytest.mark.skipif(PROGRAM is None, reason=NO_BROWSER)
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("page", ["report", "site"])
def test_a_browser_shows_pages_whole_at_the_width_of_a_phone_and_of_a_desk(page, width, tmp_path):
    file, pictures = SITE, 0
    if page == "report":
        summary = made(layers=28, heads=32) | {"certificate": CERTIFICATE, "data": "a/long/folder" * 20}
        summary["command"] = f"s2o-calibrate --prompts {'x' * 200}"
        file, pictures = write(summary, tmp_path / "p.safetensors")[-1], 4
    elif not SITE.is_file():
        pytest.skip("the site is not built: run make docs")
    tables, drawn, faults = look_at(file, width, tmp_path)
    assert (faults, drawn) == ([], pictures)
    assert tables > 0


@pytest.mark.slow(reason="starts a browser")
@pytest.mark.skipif(PROGRAM is None, reason=NO_BROWSER)
def test_a_browser_tells_what_is_cut_wide_missing_or_fails(tmp_path):
    (tmp_path / "page.html").write_text(BROKEN)
    faults = "\n".join(look_at(tmp_path / "page.html", 390, tmp_path)[2])
    for part in ("pixels wider than the window", "cut</td>", "wide</p>", "missing.png", "missing is not defined"):
        assert part in faults, part
    assert "scrolls</td>" not in faults
