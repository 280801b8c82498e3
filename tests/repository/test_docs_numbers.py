"""Numbers in the sentences of README and docs/ are those of the raw files; test_docs.py has the tables."""

import json
import re

import pytest

from scripts.bench.schema import ONE_TAU, PrefillFile
from scripts.docs.results_data import S2O_CALIBRATED, benches, newest, of_format, read_sources, relative_at
from support.pages import ROOT

RESULTS = ROOT / "docs" / "results"


def read(name):
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


DEMO, SMOLLM2 = (read(f"calibrate-{model}-h200.json") for model in ("demo", "smollm2"))
SCALING = read("scaling-h200-x2.json")
SOURCES = read_sources(RESULTS)


def times_faster(calibration, length):
    """How many times faster the whole prefill became."""
    (entry,) = [entry for entry in calibration["lengths"] if entry["length"] == length]
    return f"{entry['dense_prefill_seconds'] / entry['prefill_seconds']:.2f}"


def densities(length):
    """The largest and the least density of a layer of the demo model, with their layers."""
    (entry,) = [entry for entry in DEMO["lengths"] if entry["length"] == length]
    layers = sorted((layer["density"], layer["layer"]) for layer in entry["layers"])
    return [(layer, f"{density:.0%}") for density, layer in (layers[-1], layers[0])]


def shares(length):
    """Dense attention's share of a prefill with the sizes of Llama 3.1 8B."""
    (prefills,) = of_format(SOURCES, PrefillFile)
    (entry,) = [entry for entry in prefills.file.results if (entry.model, entry.length) == ("llama-3.1-8b", length)]
    return f"{entry.rows[0].share:.0%}"


def times_at(error, length):
    """Shares of dense attention's time at an error, of one threshold and as calibrated."""
    bench = next(bench for bench in newest(benches(SOURCES)) if bench.length == length)
    times = relative_at(bench, error)
    return str(times[ONE_TAU]), str(times[S2O_CALIBRATED])


def certificates():
    """Prompts of each length, and the probability of what is stated of the next one."""
    of_lengths = [entry for calibration in (DEMO, SMOLLM2) for entry in calibration["certificate"]["lengths"]]
    ((prompts, probability),) = {(entry["prompts"], round(entry["kl"]["probability"], 2)) for entry in of_lengths}
    return prompts, f"{probability:.0%}"


def shown_beside():
    """Of the certificates' bounds, as shares of limits: least and most over the last eighth, most for new tokens."""
    last, continued = [], []
    for calibration in (DEMO, SMOLLM2):
        for entry in calibration["certificate"]["lengths"]:
            layers = [layer for layer in entry["layers"] if layer["density"] < 1]
            last.append(max(layer["bound_last"] / layer["limit"] for layer in layers))
            continued += [call["bound"] / layer["limit"] for layer in layers for call in layer["continued"]]
    return f"{min(last):.1f}", f"{max(last):.1f}", f"{max(continued):.1f}"


def coverage(name):
    """Of fresh prompts: layers over their bound and layers, prompts over the KL, needles kept and found."""
    of_all = [row for row in read(name)["rows"] if row["domain"] == "all"]
    means = [next(count for count in row["counts"] if count["rows"] == "all rows") for row in of_all]
    above, layers = (sum(count[key] for count in means) for key in ("means_above", "layers"))
    over_kl, kept, found = (sum(row[key] for row in of_all) for key in ("kl_above", "needles_kept", "needles_found"))
    return f"{above} of {layers}", over_kl, f"{kept} of {found}"


def first_run(name):
    """The seconds of a calibration that no journal shortened."""
    return int(re.search(r" in (\d+) s$", (RESULTS / name).read_text(encoding="utf-8"), re.MULTILINE)[1])


def sentences():
    """Pages and what they must contain, whatever its lines are broken at."""
    (dense, most), (sparse, least) = densities(131072)
    prompts, probability = certificates()
    one_tau, calibrated = times_at(1e-3, 131072)
    seconds = [first_run("calibrate-demo-first-h200.txt"), round(SMOLLM2["calibration_seconds"])]
    rehearsal = round(SCALING["runs"]["one"]["seconds"])
    demo, smollm2 = coverage("coverage-demo-h200.json"), coverage("coverage-smollm2-h200.json")
    kilobytes = round((ROOT / "profiles/demo/nvidia-h200/rel-mse-0.001.safetensors").stat().st_size / 1000)
    last_least, last_most, continued = shown_beside()
    yield "README.md", f"prints after {seconds[0]} s"
    yield (
        "README.md",
        f"layer {dense} of the demo model computes {most} at 131072 tokens, layer {sparse} computes {least}",
    )
    yield "docs/faq.md", f"({kilobytes} KB for the demo model at five lengths)"
    yield (
        "docs/faq.md",
        (
            f"got {times_faster(DEMO, 8192)} times faster at 8192 tokens, "
            f"{times_faster(DEMO, 32768)} times at 32768 and {times_faster(DEMO, 131072)} times at 131072; "
            f"SmolLM2's {times_faster(SMOLLM2, 8192)} times at 8192 and {times_faster(SMOLLM2, 32768)} times at 32768"
        ),
    )
    yield "docs/faq.md", f"one layer of the demo model computes {most} of its pairs, another {least}"
    yield "docs/faq.md", f"takes {one_tau} of dense attention's time there, calibrated thresholds {calibrated}"
    yield "docs/faq.md", f"{seconds[0]} s for the demo model at three lengths"
    yield "docs/faq.md", f"{seconds[1]} s for SmolLM2-135M at two and {rehearsal} s for the sizes of Qwen2.5-7B"
    yield "docs/get-started.md", f"8 prompts of 32768 tokens took {rehearsal} s on an H200"
    yield "docs/output.md", f"takes {rehearsal} s with a certificate of 32 prompts"
    yield (
        "docs/output.md",
        (
            f"above the certified bound are {demo[0]} on the demo model and {smollm2[0]} on SmolLM2; of 64 and 128 KLs "
            f"{demo[1]} and {smollm2[1]} are above the one certified"
        ),
    )
    yield "docs/output.md", f"{demo[2]} and {smollm2[2]} needles are kept"
    yield "docs/budgets.md", f"on prompts that chose nothing, {prompts} of each length."
    yield "docs/budgets.md", f"hold for the next prompt with a probability of {probability};"
    yield "docs/how-it-works.md", f"the next prompt keeps below with a probability of {probability}"
    yield "docs/troubleshooting.md", f"{shares(32768)} at 32768 tokens and {shares(131072)} at 131072"
    yield "DESIGN.md", f"{last_least} to {last_most} times the limit over the last eighth"
    yield "DESIGN.md", f"up to {continued} times for 512 new tokens"


@pytest.mark.parametrize(("page", "sentence"), list(sentences()))
def test_a_sentence_has_the_numbers_of_the_raw_files(page, sentence):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert sentence in " ".join(text.split()), f"{page} should say {sentence!r}"


def test_the_page_of_output_quotes_output_that_there_was():
    page = (ROOT / "docs" / "output.md").read_text(encoding="utf-8")
    quoted = page.partition("```text\n")[2].partition("```")[0]
    raw = (RESULTS / "calibrate-demo-h200.txt").read_text(encoding="utf-8")
    assert len(quoted.splitlines()) > 40
    tables, sentence, statements = quoted.partition("Certified on")  # whose lines are broken for the page
    assert {line.rstrip() for line in tables.splitlines()} <= {line.rstrip() for line in raw.splitlines()}
    for statement in (sentence + statements).replace("\n32768 tokens:", "\n\n32768 tokens:").split("\n\n"):
        assert " ".join(statement.split()).removesuffix(".")[:200] in " ".join(raw.split())
