"""The evaluation measures what it says: prompts, scores and summary against numbers made by hand."""

import json
import random
import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from calibrate.evaluation import quality_plots as plots
from calibrate.evaluation import report, score
from calibrate.evaluation.plan import TASKS, Plan
from calibrate.evaluation.results import open_journal, summary
from calibrate.evaluation.run import evaluate
from calibrate.evaluation.settings import named, parsed
from calibrate.evaluation.tasks import build, cases, check
from calibrate.evaluation.variants import BASELINE, Variant, _baseline_forward, run_stats, running, variants
from calibrate.journal import Journal
from calibrate.model.models import load
from calibrate.prompts.prompt import Prompt
from s2o_runtime.baselines.settings import parse
from s2o_runtime.errors import ConfigError, InputError, ModelError
from s2o_runtime.huggingface import hf
from s2o_runtime.profile import save_profile
from support.artefacts import shared
from support.models import make_profile
from support.tiny import save_tiny

SLOW = pytest.mark.slow(reason="evaluates a model on all tasks")

EXACT, COARSE = "tau=0,segment=64", "tau=1000,segment=64"
QUALITY = tuple(task for task in TASKS if task != "time")


@pytest.fixture(scope="module")
def demo():
    return load("demo", "cpu", resident=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random model that reads characters."""
    return load(str(save_tiny(tmp_path_factory.mktemp("tiny") / "model")), "cpu", resident=True)


def run(plan, loaded, own=()):
    """The summary of a plan, measured or taken from its journal."""
    compared = variants(plan.validate(), loaded)
    with open_journal(plan, loaded) as journal:
        evaluate(plan, loaded, compared, own, journal, progress=False)
        return summary(plan, loaded, compared, own, journal)


def entries(plan):
    """The results as they stand in the journal: task, key and value."""
    with Journal.read(plan.journal_path) as journal:
        return [(task, *entry) for task in TASKS for entry in journal.entries(task)]


def lines(plan):
    """The results as they stand in the file."""
    with closing(sqlite3.connect(plan.journal_path)) as database:
        rows = database.execute("SELECT kind, key, value FROM entries ORDER BY rowid").fetchall()
    return [{"kind": kind, "key": json.loads(key), "value": json.loads(value)} for kind, key, value in rows]


@pytest.fixture(scope="module")
def measured(demo, tmp_path_factory):
    """The demo model, dense, with a setting that never stops and with one that stops as early as it can."""

    def plan(folder):
        return Plan("demo", folder, (512, 576), QUALITY, settings=(EXACT, COARSE), depths=2, samples=1, needles=8)

    whole = plan(shared(tmp_path_factory, "demo-evaluated", lambda folder: run(plan(folder), demo)))
    return whole, run(whole, demo)


def rows(found, kind, variant):
    return [row for row in found[kind] if row["variant"] == variant]


@SLOW
def test_a_setting_that_never_stops_answers_exactly_what_dense_answers(measured):
    plan, found = measured
    answers = {}
    for task, key, value in entries(plan):
        if "correct" in value:
            answers.setdefault(key.pop("variant"), {})[(task, *key.values())] = value["correct"]
    compared = [(answers[EXACT][name], correct) for name, correct in answers["dense"].items()]
    assert len(compared) == 2 * (2 + 1 + 1)  # lengths x (depths of needles, multi, variables)
    assert all(mine == theirs for mine, theirs in compared)
    needles = [row for row in rows(found, "retrieval", EXACT) if row["task"] == "needles"]
    assert [(row["found"], row["kept"], row["dense_found"], row["density"]) for row in needles] == [(2, 2, 2, 1.0)] * 2


@SLOW
def test_agreement_is_exact_for_a_setting_that_never_stops_and_not_for_a_coarse_one(measured):
    _, found = measured
    for exact, coarse in zip(rows(found, "agreement", EXACT), rows(found, "agreement", COARSE), strict=True):
        assert exact["kl"] < 1e-8  # rounding of float32 log-probabilities, squared
        assert exact["top1"] == 1
        assert coarse["kl"] > 1e-2
        assert coarse["top1"] < 0.99
        assert coarse["density"] < 0.9
        assert coarse["positions"] == 512
    lost = [row for row in rows(found, "retrieval", COARSE) if row["dense_can"]]
    assert sum(row["kept"] for row in lost) < sum(row["dense_found"] for row in lost)
    for exact in rows(found, "perplexity", EXACT):
        assert exact["perplexity"] == pytest.approx(exact["dense_perplexity"], rel=1e-5)
    assert rows(found, "perplexity", COARSE)[1]["perplexity"] > 1.01 * exact["dense_perplexity"]


def test_the_heat_map_is_what_the_lines_say(tiny, tmp_path):
    plan = Plan("tiny", tmp_path, (128, 256, 512), ("needles",), settings=(COARSE,), depths=2, samples=5).validate()
    compared = variants(plan, tiny)
    rng = random.Random(0)
    with open_journal(plan, tiny) as journal:
        for case in cases(plan, ()):
            for variant in compared:
                value = {"correct": [rng.random() < 0.5], "log_likelihood": [-1.0], "density": 1.0, "dense": {}}
                journal.put("needles", case.key(variant.identity), value)
        found = summary(plan, tiny, compared, (), journal)
    by_hand = {}
    for _, key, value in entries(plan):
        by_hand.setdefault((key["variant"], key["depth"], key["length"]), []).append(value["correct"] == [True])
    assert len(by_hand) == 2 * 2 * 3
    for heat in found["heat"]:
        shares = [[by_hand[heat["variant"], depth, length] for length in (128, 256, 512)] for depth in (0.0, 1.0)]
        assert heat["accuracy"] == [[sum(right) / 5 for right in row] for row in shares]
    assert plots.pictures(found).keys() == {"needles"}
    kept = [row["kept"] for row in rows(found, "retrieval", COARSE)]
    both = [
        sum(
            mine and theirs
            for depth in (0.0, 1.0)
            for mine, theirs in zip(*(by_hand[name, depth, length] for name in (COARSE, "dense")), strict=True)
        )
        for length in (128, 256, 512)
    ]
    assert kept == both


def test_perplexity_is_the_cross_entropy(demo):
    ids = torch.randint(0, 4096, (150,))
    value = score.negative_log_likelihood(score.ForwardPass(demo, ids))
    with torch.no_grad():
        logits = demo.model(ids[None], use_cache=False).logits[0, :-1]
    each = F.cross_entropy(logits, ids[1:], reduction="none").double()
    assert sum(value["nll"]) / sum(value["tokens"]) == pytest.approx(float(F.cross_entropy(logits, ids[1:])), rel=1e-5)
    parts = [[position for position in range(1, 150) if position * 8 // 150 == part] for part in range(8)]
    assert value["tokens"] == [len(part) for part in parts]
    expected = [float(sum(each[position - 1] for position in part)) for part in parts]
    assert value["nll"] == pytest.approx(expected, rel=1e-5)
    edges = score.bucket_edges(150)
    assert [list(range(max(1, first), last)) for first, last in pairwise(edges)] == parts


def test_agreement_is_the_divergence_made_by_hand(tiny, tmp_path):
    ids = torch.randint(3, 99, (700,))
    positions = torch.arange(5, 700, 3)
    compared = variants(Plan("tiny", tmp_path, (700,), settings=(COARSE,)).validate(), tiny)
    kept = score.reference(score.ForwardPass(tiny, ids), positions)
    with running(tiny.model, compared[1]):
        value = score.agreement(score.ForwardPass(tiny, ids), positions, kept)
        with torch.no_grad():
            q = tiny.model(ids[None], use_cache=False).logits[0].double().log_softmax(-1)[positions]
    with torch.no_grad():
        p = tiny.model(ids[None], use_cache=False).logits[0].double().log_softmax(-1)[positions]
    part = positions * 8 // 700
    kl, same = (p.exp() * (p - q)).sum(-1), p.argmax(-1) == q.argmax(-1)
    assert value["kl"] == pytest.approx([float(kl[part == each].sum()) for each in range(8)], rel=1e-4, abs=1e-5)
    assert value["same"] == [int(same[part == each].sum()) for each in range(8)]
    assert value["positions"] == [int((part == each).sum()) for each in range(8)]
    assert sum(value["kl"]) > 1e-3


def test_answers_are_right_only_if_every_token_is_the_most_likely_one(demo):
    ids = torch.randint(0, 4096, (120,))
    with torch.no_grad():
        for place in range(100, 105):  # the model's own choice, greedily
            ids[place] = demo.model(ids[None, :place], use_cache=False).logits[0, -1].argmax()
        likely = demo.model(ids[None], use_cache=False).logits[0].double().log_softmax(-1)
    spans = ((100, 105), (99, 105), (102, 103))
    value = score.answers(score.ForwardPass(demo, ids), Prompt(ids, spans))
    assert value["correct"] == [True, False, True]
    expected = [sum(float(likely[place - 1, ids[place]]) for place in range(*span)) for span in spans]
    assert value["log_likelihood"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("keep", "same"), [(1.0, True), (0.3, False)])
def test_a_baseline_computes_every_layer_of_full_attention(tiny, tmp_path, keep, same):
    text = f"pbs:keep={keep},segment=128,block=64"
    plan = Plan("tiny", tmp_path, (700,), settings=(text,)).validate()
    dense, baseline = variants(plan, tiny)
    assert baseline.name == text
    ids, hidden = torch.randint(3, 99, (700,)), {}
    for variant in (dense, baseline):
        with running(tiny.model, variant):
            hidden[variant.name] = score.ForwardPass(tiny, ids).hidden
    assert torch.allclose(hidden["dense"], hidden[text], atol=1e-4) == same
    layers = [float(stats.density.mean()) for stats in baseline.last.values()]
    assert len(layers) == tiny.geometry.layers
    assert run_stats(baseline).density == pytest.approx(sum(layers) / len(layers))
    assert (run_stats(baseline).density == 1.0) == same
    assert tiny.model.config._attn_implementation == "sdpa"
    with running(tiny.model, dense):  # nothing of the baseline is left
        assert torch.equal(score.ForwardPass(tiny, ids).hidden, hidden["dense"])


@pytest.mark.parametrize(
    ("head_dim", "options", "obstacle"),
    [(64, {"softcap": 2.0}, "scores that are soft-capped at 2"), (192, {}, "a head_dim of 192, over 128")],
)
def test_a_baseline_refuses_what_it_cannot_compute(head_dim, options, obstacle):
    variant, module = Variant("pbs", "pbs", baseline=parse("pbs")), torch.nn.Module()
    setattr(module, BASELINE, variant)
    q, mask = torch.randn(1, 2, 300, head_dim), torch.zeros(1, 1, 1, 2, dtype=torch.int64)
    setattr(mask, hf.CALL, hf.PrefillCall(0, None, lambda: None))
    with pytest.raises(InputError, match=f"pbs cannot compute {obstacle}: leave this setting out"):
        _baseline_forward(module, q, q, q, mask, **options)


def test_predictions_that_are_not_finite_are_named(tiny):
    forward = score.ForwardPass(tiny, torch.randint(3, 99, (100,)))
    forward.hidden[50] = torch.nan
    with pytest.raises(ModelError, match="a prompt of 100 tokens hold inf or NaN, expected finite numbers"):
        score.negative_log_likelihood(forward)


def plan_of(tmp_path, **changes):
    options = {"lengths": (1024,), "needles": 9, "depths": 3, "samples": 2} | changes
    return Plan("demo", tmp_path, **options).validate()


def text_of(demo, ids):
    return demo.tokenizer.decode(ids)


def test_a_needle_is_where_it_should_be(demo, tmp_path):
    plan = plan_of(tmp_path, tasks=("needles",))
    for case in cases(plan, ()):
        asked = build(case, plan, demo.tokenizer, ())
        text = text_of(demo, asked.ids)
        ((first, last),) = asked.answers
        ((word, code),) = re.findall(
            r"What is the secret code for (\w+)\? The secret code for \w+ is (\d{5})\.\n$", text
        )
        assert len(asked.ids) == 1024
        assert text_of(demo, asked.ids[first:last]) == code
        ((stated, place),) = [
            (found[1], found.start()) for found in re.finditer(r"\n# The secret code for (\w+) is \d", text)
        ]
        before = len(demo.tokenizer(text[:place], add_special_tokens=False).input_ids)
        assert stated == word
        assert before == pytest.approx(case.depth * (1024 - 20 - 33), abs=6)  # a fact and a question, in tokens


def test_chains_lead_from_every_variable_that_is_asked_for_to_its_code(demo, tmp_path):
    plan = plan_of(tmp_path, tasks=("variables",))
    asked = build(cases(plan, ())[1], plan, demo.tokenizer, ())
    text = text_of(demo, asked.ids)
    stated = re.findall(r"\n# The secret code for (\w+) is (?:the secret code for )?(\w+)\.\n", text)
    known = {}
    for word, value in stated:  # in the order of the text: what is referred to has been said before
        known[word] = (known[value][0], known[value][1] + 1) if value in known else (value, 0)
    questions = re.findall(r"# What is the secret code for (\w+)\? The secret code for \w+ is (\d{5})\.\n", text)
    assert len(asked.ids) == 1024
    assert len(stated) == 12
    assert [known[word] for word, _ in questions] == [(code, 2) for _, code in questions]
    assert len({code for _, code in questions}) == 4


def test_a_length_too_short_for_a_task_names_one_that_is_not(demo, tmp_path):
    plan = plan_of(tmp_path, lengths=(256,), tasks=("needles", "multi"))
    with pytest.raises(InputError, match=r"length 256 is too short for the task 'multi': use \d+ tokens") as refused:
        check(plan, demo.tokenizer)
    enough = replace(plan, lengths=(int(re.search(r"use (\d+) tokens", str(refused.value))[1]),))
    check(enough, demo.tokenizer)
    for case in cases(enough, ()):
        asked = build(case, enough, demo.tokenizer, ())
        assert len(re.findall(r"# The secret code for \w+ is \d{5}\.\n", text_of(demo, asked.ids))) >= 1


class Killed(BaseException):
    pass


def dies_after(survived, put):
    """`put` so many times, and then the process dies."""
    left = iter(range(survived))

    def dies(*arguments):
        if next(left, None) is None:
            raise Killed
        put(*arguments)

    return dies


@SLOW
def test_a_killed_run_ends_with_the_same_summary(tiny, tmp_path, monkeypatch):
    def plan(name):
        options = {"settings": (COARSE,), "depths": 2, "samples": 2, "needles": 2, "repeats": 1}
        return Plan("tiny", tmp_path / name, (400, 512), (*(task for task in TASKS if task != "variables"),), **options)

    whole = run(plan("whole"), tiny)
    killed = plan("killed")
    put = Journal.put
    for survived in (0, 3, 7, 11):
        monkeypatch.setattr(Journal, "put", dies_after(survived, put))
        with pytest.raises(Killed):
            run(killed, tiny)
    monkeypatch.setattr(Journal, "put", put)
    before = lines(killed)
    resumed = run(killed, tiny)
    assert lines(killed)[: len(before)] == before
    assert len(before) == 0 + 3 + 7 + 11
    assert json.dumps(run(killed, tiny)) == json.dumps(resumed)  # times too: nothing is measured again
    times = [outcome.pop("time") for outcome in (whole, resumed)]
    assert json.dumps(whole) == json.dumps(resumed).replace("/killed", "/whole")
    assert [sorted(row) for row in times[0]] == [sorted(row) for row in times[1]]


def test_results_of_other_inputs_are_refused_by_name(tiny, tmp_path):
    plan = Plan("tiny", tmp_path, (400,), ("needles",), depths=1, samples=1)
    run(plan, tiny)
    with pytest.raises(InputError, match="was made with seed 0, this run has 1: give another --out-dir, or delete it"):
        run(replace(plan, seed=1), tiny)


@SLOW
def test_profiles_run_as_they_are_deployed(tiny, tmp_path):
    for name, tau in (("exact", 0.0), ("coarse", 1000.0)):
        save_profile(make_profile(tiny.model, tau, min_length=400), tmp_path / f"{name}.safetensors")
    files = tuple(tmp_path / f"{name}.safetensors" for name in ("exact", "coarse"))
    plan = Plan("tiny", tmp_path / "out", (300, 500), ("needles", "agreement", "time"), files, depths=1, repeats=1)
    found = run(plan, tiny)
    assert [variant["name"] for variant in found["variants"]] == ["dense", "exact", "coarse"]
    short, long = rows(found, "agreement", "coarse")
    assert (short["kl"], short["density"]) == (pytest.approx(0, abs=1e-8), 1.0)
    assert long["kl"] > 1e-3
    assert rows(found, "agreement", "exact")[1]["kl"] < 1e-8
    assert rows(found, "time", "coarse")[0]["dense"] == {"shorter than the shortest calibrated length, 400": 2}
    assert "coarse at 300 tokens: 2 layers ran dense (shorter than the shortest calibrated length, 400)" in (
        report.notes(found)
    )
    assert tiny.model.config._attn_implementation == "sdpa"
    save_profile(make_profile(tiny.model, 5.0, min_length=300), files[1])  # another profile under the same name
    assert rows(run(plan, tiny), "agreement", "coarse")[0]["kl"] > 1e-6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tau=much", "setting 'tau=much': tau is 'much': expected a number, such as tau=0.3"),
        ("tau=0.1,segmnt=64", "has 'segmnt=64', expected tau=.., segment=.."),
        ("tau=0.1,tail=yes", "has 'tail=yes', expected"),
        ("segment=64", "setting 'segment=64' has no tau"),
        ("tau=1,tau=2", "gives tau twice"),
        ("tau=1,segment=100", "segment 100 is not a multiple of 64: round it"),
        ("tau=-1", "tau -1.0 is out of range"),
        ("tau=1,stop_rule=last", "stop_rule 'last' is not known: use one of rest, share, paper"),
        ("tau=1,grain=3", "grain 3 is not supported: use one of"),
    ],
)
def test_a_bad_setting_names_the_part(text, message):
    with pytest.raises(ConfigError) as refused:
        parsed(text)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("tau=0.3,segment=1024,representatives=32,tail", "tau=0.3,segment=1024,representatives=32,tail"),
        (" tail , segment=256, tau=3e-1", "tau=0.3,segment=256,tail"),
        ("grain=4,stop_rule=raw,row_reduce=max,tau=0", "tau=0,grain=4,stop_rule=paper,row_reduce=max"),
        ("linear,segment=512", "segment=512,linear"),
    ],
)
def test_a_setting_has_one_name(text, name):
    assert named(text) == name
    assert parsed(name) == parsed(text)
