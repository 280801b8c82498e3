"""scripts/docs/results.py: its numbers against ones worked out by hand, and the page against the raw data."""

import json
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts.bench.paged import PagedFile
from scripts.bench.schema import (
    AttentionFile,
    LayerRow,
    MethodRow,
    MethodsFile,
    PrefillFile,
    RehearsalFile,
    RehearsalRow,
    read,
)
from scripts.bench.serving import ServingFile
from scripts.bench.tails import TailsFile
from scripts.docs import results
from scripts.docs.results_data import (
    MAKES,
    Bench,
    Source,
    Time,
    benches,
    newest,
    on_front,
    read_sources,
    relative_at,
    three,
)

DOCS = Path(__file__).parents[2] / "docs"
ORIGIN = {"date": "2026-01-02", "device": {"name": "a GPU", "sm_count": 7}, "versions": {"torch": "2.0"}}


def row(method, setting, seconds, rel_mse, density=0.5, selecting=0.0):
    layers = [LayerRow(layer, density, 0.0, 0.0, 0.0, 0.0, 0.0) for layer in range(3)]
    errors = {"density": density, "mse": rel_mse / 2, "rel_mse": rel_mse, "worst": 2 * rel_mse}
    times = {"seconds": seconds, "selecting_seconds": selecting, "speedup": None}
    return MethodRow(method=method, setting=setting, layers=layers, **times, **errors)


def quartiles(seconds):
    return {"p25": seconds, "median": seconds, "p75": seconds}


ROWS = [
    row("dense (cuDNN)", "", 1.0, 1e-6, density=1.0),
    row("dense (FlashAttention-2)", "", 2.0, 1e-6, density=1.0),
    row("S2O, one tau", "tau=0.01", 0.8, 1e-4, selecting=0.2),
    row("S2O, one tau", "tau=1", 0.2, 1e-2),
    row("S2O, calibrated", "rel_mse 0.001, proven", 0.398, 2e-3),
    row("S2O, calibrated", "rel_mse 0.01", 1.0, 1e-6, density=1.0),
    row("pbs", "keep=0.9", 0.5, 1e-3),
    row("pbs", "keep=0.5", 0.5, 4e-3),  # beaten by the one above
    row("pbs", "keep=0.1", 0.1, 2.5e-1),
    row("mean-pooling", "keep=0.9", 0.25, 3e-4),
    row("mean-pooling", "keep=0.8", 0.2, 6e-4),
]
RAW_ROWS = [asdict(each) for each in ROWS]
BENCH = {
    "format": MethodsFile.format,
    **ORIGIN,
    "settings": {"methods": ["dense", "s2o"], "lengths": [32768], "data": "demo", "profile": ["a.x", "b.x"]}
    | {"journal": None, "batch": 4, "error_rows": 256, "seed": 0, "budgets": [0.0003]},
    "results": [{"length": 32768, "rows": RAW_ROWS}],
}  # fmt: skip
STUDY = {"model": "demo", "length": 32768, "device": "a GPU", "versions": {"torch": "2.0"}} | {
    "rows": [
        {
            "budget": budget,
            "worst_rows": guard,
            "needles": [kept, 256],
            "density": 0.25,
            "rel_mse": 1e-3,
            "kl": 2e-3,
            "top1": 0.9,
        }
        | {"attention_seconds": seconds, "dense_attention_seconds": 0.02}
        for budget, guard, kept, seconds in ((1e-3, 0.5, 256, 0.01), (1e-2, 0.5, 254, 0.008), (1e-2, None, 250, 0.004))
    ]
}
EVALUATION = {"model": "demo", "plan": {}, "variants": [], "device": "a GPU", "versions": {}, "command": "s2o-eval x"}
EVALUATION |= {
    "retrieval": [
        {"task": "multi", "variant": variant, "length": 32768, "asked": 100, "found": found, "dense_found": 99}
        | {"density": 0.5}
        for variant, found in (
            ("dense", 99), ("pbs:keep=0.9", 98), ("pbs:keep=0.1", 90), ("tau=0.01,segment=1024,grain=4,tail", 99),
            ("tau=1,segment=512", 99), ("x/s2o/rel-mse-0.001", 99),
        )
    ]
}  # fmt: skip
PREFILL = {
    "format": PrefillFile.format, **ORIGIN, "settings": {"models": ["m"], "lengths": [4096]},
    "results": [{"model": "m", "length": 4096, "peak_bytes": None, "rows": [
        {"name": "dense, cuDNN", "density": 1.0, "seconds": quartiles(3.0)}
        | {"attention_seconds": 1.5, "share": 0.5},
        {"name": "S2O, density 0.1", "density": 0.1, "seconds": quartiles(2.0)}
        | {"attention_seconds": 0.5, "share": 0.25},
    ]}],
}  # fmt: skip


def bench(rows=ROWS):
    return Bench(Source("b.json", read(MethodsFile, BENCH)), 32768, rows)


@pytest.fixture
def docs(tmp_path):
    """A folder as docs/ is, and what puts a record into it."""
    (tmp_path / "results").mkdir()

    def put(name, record):
        text = record if isinstance(record, str) else json.dumps(record)
        (tmp_path / "results" / name).write_text(text)

    return tmp_path, put


def run(folder, *arguments):
    return results.main([*arguments, "--docs", str(folder)])


def cells(page, *words):
    """The cells of the table rows whose first words are these."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    return [each for each in rows if each[: len(words)] == list(words)]


def section(page, title):
    """From a heading to the next one of its level or above."""
    level, body = len(title.split()[0]), page.split(f"{title}\n", 1)[1]
    ends = [body.find(f"\n{'#' * each} ") for each in range(2, level + 1)]
    return body[: min((end for end in ends if end >= 0), default=None)]


@pytest.mark.parametrize(("value", "text"), [
    (0, "0"), (1, "1.00"), (0.0849, "0.0849"), (9.996, "10.0"), (12.34, "12.3"), (325.17, "325"), (1234.0, "1230"),
])  # fmt: skip
def test_three_digits(value, text):
    assert three(value) == text


def test_the_front_keeps_what_nothing_beats_and_what_ties():
    front = {(each.method, each.setting) for each in ROWS if on_front(each, ROWS)}
    assert front == {
        ("dense (cuDNN)", ""), ("S2O, calibrated", "rel_mse 0.01"),  # the same point
        ("S2O, one tau", "tau=0.01"), ("mean-pooling", "keep=0.9"), ("mean-pooling", "keep=0.8"),
        ("pbs", "keep=0.1"),
    }  # fmt: skip
    nearly = row("pbs", "", 0.2 * 1.005, 6e-4)
    assert on_front(nearly, [*ROWS, nearly])  # half a percent behind
    assert not on_front(row("S2O, one tau", "", 0.2, 1e-2), ROWS)  # as fast as another that is more exact


def test_times_at_an_error_lie_between_the_neighbours():
    at = {error: relative_at(bench(), error) for error in results.ERRORS}
    assert at[1e-3]["S2O, one tau"].value == pytest.approx(0.4)  # sqrt(0.8 * 0.2), half way from 1e-4 to 1e-2
    assert at[1e-4]["S2O, one tau"].value == pytest.approx(0.8)
    # beaten settings do not bend the curve: from (1e-3, 0.5) to (0.25, 0.1), log(10) / log(250) of the way
    assert at[1e-2]["pbs"].value == pytest.approx(0.5 * 0.2**0.41702, rel=1e-4)
    assert "pbs" not in at[3e-4]  # not so exact
    assert at[3e-3]["mean-pooling"] == Time(0.2, bound=True)
    assert "S2O, calibrated" not in at[1e-3]  # its dense setting is no neighbour
    assert {at[error]["dense (FlashAttention-2)"] for error in at} == {Time(2.0)}


def test_the_verdict_names_where_s2o_is_behind():
    one, calibrated = results.verdicts(bench())
    assert one == (
        "At 32768 tokens S2O is not the fastest at 3e-04 (0.575; mean-pooling: 0.250); 1e-03 (0.400; mean-pooling: "
        "≤0.200); 3e-03 (0.287; mean-pooling: ≤0.200)."
    )  # 0.8 / 4 ** (log(3) / log(100)) = 0.575, 0.8 / 4 ** (log(30) / log(100)) = 0.287; at 1e-02 they tie
    assert calibrated.startswith(
        "At 32768 tokens S2O as calibrated is not the fastest at 1e-04 (no setting is so exact"
    )
    # what may be S2O in every head does not take part
    free = row(results.ANY, "rel_mse 0.001", 1e-6, 1e-5, density=0.1)
    assert results.verdicts(bench([*ROWS, free])) == [one, calibrated]
    alone = bench([each for each in ROWS if each.method in ("dense (cuDNN)", "S2O, one tau")])
    assert results.verdicts(alone) == ["At 32768 tokens S2O is the fastest, or ties, at all of these errors."]


def test_the_page_of_everything(docs):
    folder, put = docs
    put("bench-gpu.json", BENCH)
    put("bench-gpu.note.txt", "Four prompts\nare few.\n")
    put("study.json", STUDY)
    put("eval.json", EVALUATION)
    put("prefill.json", PREFILL)
    put("strange.json", {"format": "other/1"})
    assert run(folder) == 0
    page = (folder / "results.md").read_text()

    head = section(page, "## Where the numbers come from")
    assert "| [bench-gpu.json](results/bench-gpu.json) | 2026-01-02 | a GPU, 7 SMs | torch 2.0 |" in head
    assert (
        "python -m scripts.bench.methods --methods dense s2o --lengths 32768 --data demo --profile a.x --profile b.x "
        "--batch 4 --error-rows 256 --seed 0 --budgets 0.0003 --out docs/results/bench-gpu.json" in head
    )
    assert (
        "python -m scripts.study.budgets --model demo --length 32768 --budgets 0.001,0.01 --worst-rows 0.5,off --out"
        in head
    )
    assert "not shown here: [strange.json](results/strange.json)." in head

    every = section(page, "## Attention, every method")
    assert cells(every, "●", "S2O, one tau") == [
        ["●", "S2O, one tau", "`tau=0.01`", "800", "200", "1.25x", "0.500", "5.0e-05", "1.0e-04", "2.0e-04"]
    ]
    assert cells(every, "", "S2O, one tau")[0][2] == "`tau=1`"
    assert "`demo`, 3 layers, batch 4, errors in 256 rows" in every
    assert "1 of 2 calibrated settings exceed the error that they were calibrated for, the worst 2.00 times" in every
    assert "**Caution:** Four prompts are few." in every

    equal = section(page, "## Speed at equal error")
    assert cells(equal, "S2O, one tau") == [["S2O, one tau", "**0.800**", "0.575", "0.400", "0.287", "**0.200**"]]
    assert cells(equal, "mean-pooling")[0][1:] == ["-", "**0.250**", "**≤0.200**", "**≤0.200**", "**≤0.200**"]
    assert results.verdicts(bench())[0] in equal
    assert "**Caution:** Four prompts are few." in equal

    assert cells(section(page, "## Where the time goes"), "32768", "pbs")[0][2] == "`keep=0.9`"
    retrieval = section(page, "## Retrieval")
    assert "fastest is budget 1e-02 with guard 0.5: 8.00 ms, 2.50x." in retrieval
    found = {each[1]: each[2:] for each in cells(retrieval, "32768")}
    assert found["`pbs:keep=0.9`"] == ["98 of 100", "99 of 100", "0.500", "500", "0.500"]
    assert found["`tau=0.01,segment=1024,grain=4,tail`"][3:] == ["800", "0.800"]
    assert found["`tau=1,segment=512`"][3:] == ["-", "-"]  # the bench ran no such setting
    assert found["`x/s2o/rel-mse-0.001`"][3:] == ["398", "0.398"]
    assert "`x/s2o/rel-mse-0.001` is the fastest: 0.398 of dense's time" in retrieval  # pbs:keep=0.1 finds too little
    speed = section(page, "### 32768 tokens, retrieval at equal speed")
    assert cells(speed, "S2O, calibrated") == [["S2O, calibrated", "-", "-", "-", "99", "99", "99"]]  # 0.398
    assert cells(speed, "S2O, one tau") == [["S2O, one tau", *["-"] * 5, "99"]]  # 0.8
    assert cells(speed, "pbs")[0][4:] == ["98", "98", "98"]  # keep=0.9 at 0.5
    ttft = section(page, "## Time to first token")
    assert cells(ttft, "m")[1] == ["m", "4096", "S2O, density 0.1", "0.100", "2.00", "1.50x", "25%"]
    assert "Not measured yet: `python -m scripts.bench.attention --out" in section(page, "## The kernel alone")


def test_a_variant_of_the_evaluation_is_a_row_of_the_bench():
    assert results.named("dense") == ("dense (cuDNN)", "")
    assert results.named("x/pbs/rel-mse-0.01-rows-0.8") == ("PBS-Attn, calibrated", "rel_mse 0.01, rows 0.8")
    assert results.named("mse-1e-04") == ("S2O, calibrated", "mse 0.0001")
    for rule in ("raw", "paper"):
        variant = f"tau=0.01,segment=1024,stop_rule={rule},row_reduce=max"
        assert results.named(variant) == ("S2O as published", "tau=0.01")
    assert results.named("tau=0.01,segment=512,tail") == ("", "")
    assert results.named("pbs:keep=0.9") == ("pbs", "keep=0.9")


def test_the_kernel_has_rows_as_published_and_a_picture(docs):
    folder, put = docs

    def measured(form, seconds):
        numbers = {
            "target": 0.5,
            "density": 0.5,
            "seconds": quartiles(seconds),
            "prefill_seconds": quartiles(1.0),
        }
        rates = {"rate": 0.5, "prefill_rate": 0.75, "rel_mse": 1e-3}
        return numbers | rates | {"density_of_heads": [0.5], "tau_of_heads": [0.1], "form": form}

    tile = {"block_m": 64, "block_n": 128, "chunk": 4, "num_warps": 4, "num_stages": 2, "specialized": True}
    entry = {"length": 4096, "tile": tile, "tile_name": "64x128x4 ws s2", "rank": None}
    entry |= {"dense": {"backend": "CUDNN", "seconds": quartiles(2.0), "rel_mse": 1e-6}}
    entry |= {"rows": [measured("S2O", 1.0), measured("S2O as published", 4.0)]}
    settings = {"heads": [2, 1], "head_dim": 64, "batch": 1, "dtype": "bfloat16", "data": "random", "segment": 64}
    file = {"format": AttentionFile.format, **ORIGIN, "settings": settings | {"grain": 4}, "results": [entry]}
    put("kernel.json", file)
    assert run(folder) == 0
    kernel = section((folder / "results.md").read_text(), "## The kernel alone")
    assert cells(kernel, "4096", "64x128x4 ws s2") == [
        ["4096", "64x128x4 ws s2", "0.5", "0.500", "1000", "2.00x", "0.50", "0.75", "1.0e-03"],
        ["4096", "64x128x4 ws s2", "0.5, as published", "0.500", "4000", "0.500x", "0.50", "0.75", "1.0e-03"],
    ]
    picture = (folder / "results" / "kernel.svg").read_text()
    for label in ("4096 tokens", "ideal: 100%", "target: 75%", "segment 64, as published, without ranking"):
        assert label.replace(" ", "") in picture.replace(" ", ""), label


def test_a_bench_of_another_model_has_its_name_and_stays_out_of_what_is_of_one_model(docs):
    folder, put = docs
    put("a.json", BENCH)
    put("b.json", BENCH | {"date": "2099-01-01", "settings": BENCH["settings"] | {"data": "build/other"}})
    sources = read_sources(folder / "results")
    assert [bench.source.name for bench in newest(benches(sources))] == ["a.json"]
    assert run(folder) == 0
    page = (folder / "results.md").read_text()
    for title in ("32768 tokens", "32768 tokens of other"):
        assert page.count(f"\n### {title}\n") == page.count(f"\n### {title} at equal error\n") == 1
    assert "At 32768 tokens of other S2O is" in page
    assert len(cells(section(page, "## Where the time goes"), "32768 of other", "pbs")) == 1


def test_attention_times_are_of_the_same_model(docs):
    folder, put = docs
    put("bench.json", BENCH)
    put("eval.json", EVALUATION | {"model": "another"})
    assert run(folder) == 0
    found = cells(section((folder / "results.md").read_text(), "### Many needles, `another`"), "32768")
    assert {tuple(each[-2:]) for each in found} == {("-", "-")}


def test_pictures_are_pictures_and_the_same_bytes_again(docs):
    folder, put = docs
    put("bench.json", BENCH)
    assert run(folder) == 0
    files = sorted((folder / "results").glob("*.svg"))
    assert [path.name for path in files] == ["methods-error.svg", "methods-time.svg"]
    for path in files:
        assert ElementTree.fromstring(path.read_text()).tag.endswith("svg")
    before = [path.read_bytes() for path in files]
    for path in files:
        path.unlink()
    assert run(folder) == 0
    assert [path.read_bytes() for path in files] == before


def test_check_writes_nothing_and_says_what_differs(docs, capsys):
    folder, put = docs
    put("bench.json", BENCH)
    assert run(folder, "--check") == 1
    assert not (folder / "results.md").exists()
    assert run(folder) == run(folder, "--check") == 0
    capsys.readouterr()
    page = folder / "results.md"
    page.write_text(page.read_text().replace("0.800", "0.700"))
    assert run(folder, "--check") == 1
    assert "results.md is not what docs/results holds" in capsys.readouterr().out
    assert "0.700" in page.read_text()


def test_nothing_measured_says_what_to_run(docs):
    folder, _ = docs
    assert run(folder) == 0
    page = (folder / "results.md").read_text()
    for command in MAKES.values():
        assert f"Not measured yet: `{command}` would." in page
    assert not list((folder / "results").glob("*.svg"))


@pytest.mark.parametrize(("record", "words"), [
    ("{", "bench.json cannot be read (it is not JSON)"),
    ("[1]", "bench.json holds a list, expected an object"),
    ({"format": MethodsFile.format}, "bench.json lacks device"),
    (BENCH | {"settings": {}}, "bench.json lacks settings.data"),
    (BENCH | {"results": [{"length": 1, "rows": [{"method": "x"}]}]}, "bench.json lacks results.rows.setting"),
    (BENCH | {"results": [3]}, "bench.json lacks results.length"),
    (BENCH | {"results": [{"length": 9, "rows": RAW_ROWS[1:]}]}, "bench.json has no dense (cuDNN) at 9 tokens"),
    ({"model": "m", "length": 1, "rows": [{}], "device": "", "versions": {}}, "bench.json lacks rows.budget"),
], ids=["not JSON", "a list", "empty", "no settings", "short rows", "no entries", "no dense", "no study"])  # fmt: skip
def test_bad_files_are_one_sentence(docs, capsys, record, words):
    folder, put = docs
    put("bench.json", record)
    assert run(folder) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"scripts.docs.results: {words}")
    assert error.count("\n") == 1
    assert not (folder / "results.md").exists()


def test_the_page_is_of_the_raw_data():
    """Pictures by existence: their bytes depend on matplotlib's version."""
    sources = read_sources(DOCS / "results")
    assert (DOCS / "results.md").read_text() == results.page(sources), "run python -m scripts.docs.results"
    if benches(sources):
        assert all((DOCS / "results" / f"methods-{name}.svg").is_file() for name in ("error", "time"))


def test_servers_tails_and_rehearsals(docs):
    """Speed-ups are the first time over the second; what went dense has the kernels' in brackets."""
    folder, put = docs
    settings = {"heads": "8,2", "head_dim": 64}
    modelled = {"length": 900, "chunk": 300, "cached": 0.5, "density": 0.25}
    times = {"s2o_seconds": 2e-3, "dense_seconds": 9e-3, "at_whole_rate_seconds": 5e-3}
    served = {"label": "stock", "length": 900, "cached": 0.0, "concurrency": 4}
    rates = {"first_token_seconds": 0.25, "tokens_per_second": 3600.0}
    put("serving.json", ORIGIN | {"format": ServingFile.format, "settings": settings}
        | {"modelled": [modelled | times], "served": [served | rates]})  # fmt: skip
    point = {"dense_seconds": 3.0, "kernel_seconds": 4.0}
    points = [
        {"queries": 16, "keys": 512, "auto_seconds": 3.0, "backend": "dense"},
        {"queries": 512, "keys": 2048, "auto_seconds": 1.5, "backend": "triton"},
    ]
    chunks = [
        {"keys": 2048, "chunk": 512, "auto_seconds": 3e-3, "dense_seconds": 8e-3},
        {"keys": 2048, "chunk": 2048, "auto_seconds": 2e-3, "dense_seconds": 5e-3},
    ]
    put("tails.json", ORIGIN | {"format": TailsFile.format, "settings": settings, "tile": {}, "chunks": chunks}
        | {"needed": 32, "points": [point | own for own in points]})  # fmt: skip
    call = {"queries": 512, "keys": 2048, "in_place_seconds": 2e-3, "copy_seconds": 3e-3, "contiguous_seconds": 1e-3}
    put("paged.json", ORIGIN | {"format": PagedFile.format, "settings": settings | {"page_size": 16, "dense_heads": 2}}
        | {"points": [call | {"copy_bytes": 8_000_000}]})  # fmt: skip
    good = asdict(RehearsalRow("big", {"full_attention": 3, "sliding_attention": 9}, 12, weights="nf4"))
    entry = {"length": 900, "s2o_layers": 2, "density": 0.5, "density_of_layers": [], "rel_mse_of_layers": []}
    entry |= {"kl": 0.0, "prefill_seconds": 1.0, "dense_prefill_seconds": 1.0, "certified": True, "certify_prompts": 9}
    good |= {"lengths": [entry | {"largest_bound": None, "next_kl": None}], "seconds": {"calibration": 61.4}}
    good |= {"peak_bytes": {"weights": 1 << 30, "calibration": 3 << 30}}
    bad = asdict(RehearsalRow("bad", {"full_attention": 3}, 3, failed="no room"))
    put("rehearsals.json", ORIGIN | {"format": RehearsalFile.format, "settings": {"models": []}, "rows": [good, bad]})
    assert run(folder) == 0
    page = (folder / "results.md").read_text()
    assert "| 900 | 300 | 50% | 0.250 | 2.00 ms | 9.00 ms | 5.00 ms | 2.50x |" in page
    assert "| stock | 900 | 0% | 4 | 250 ms | 3600 |" in page
    assert "| 16 | 1.00 (0.75) |  |" in page
    assert "| 512 |  | 2.00 |" in page
    assert "| 512 | 3.00 ms | 1.50 | 8.00 ms | 1.60 |" in page
    assert "2 of them dense, pages of 16" in page
    assert "| 512 | 2048 | 2.000 ms | 3.000 ms | 1.000 ms | 1.50 | 8 MB |" in page
    assert "| 2048 | 2.00 ms | 1.00 | 5.00 ms | 1.00 |" in page
    assert "| big | nf4 | 900 | 2 of 3 | 9 sliding_attention | 0.500 | yes, 9 prompts | 61 s | 3.0 GiB |" in page
    assert "| bad | - | - | 3 | - | - | failed: no room | - | - |" in page
