"""The evaluation measures what it says: prompts, scores and summary against numbers made by hand."""

import json
import random
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from calibrate.evaluation import plan, report, score
from calibrate.evaluation.plan import TASKS, EvaluationPlan, normalise_setting, parse_setting
from calibrate.evaluation.results import open_journal, summarise
from calibrate.evaluation.run import (
    BASELINE,
    Evaluation,
    Variant,
    _run_baseline,
    collect_run_stats,
    evaluate,
    list_variants,
    run_as,
)
from calibrate.evaluation.tasks import build, check_lengths, list_cases, read_user_prompts
from calibrate.journal import Journal
from calibrate.model.models import DEMO_FOLDER, load
from calibrate.prompts.prompt import Prompt
from s2o_runtime.errors import ConfigError, InputError, ModelError
from s2o_runtime.huggingface import hf
from s2o_runtime.profile import save_profile
from s2o_runtime.reference.dense import dense_attention
from scripts.bench.baselines.settings import BASELINES, parse
from support.models import make_profile
from support.pages import ROOT

SLOW = pytest.mark.slow(reason="evaluates a model on all tasks")

COARSE = "tau=1000,segment=64"


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    """A random model that reads characters."""
    return load(str(tiny_folder), "cpu", resident=True)


def run(plan, loaded, own=()):
    """The summary of a plan, measured or taken from its journal."""
    compared = list_variants(plan.validate(), loaded)
    with open_journal(plan, loaded) as journal:
        evaluation = Evaluation(plan, loaded, compared, own, journal)
        evaluate(evaluation, progress=False)
        return summarise(evaluation)


def entries(plan):
    """The results in the order of the journal: task, key and value."""
    with closing(sqlite3.connect(plan.journal_path)) as database:
        rows = database.execute("SELECT kind, key, value FROM entries ORDER BY rowid").fetchall()
    return [(task, json.loads(key), json.loads(value)) for task, key, value in rows]


def rows(results, kind, variant):
    return [row for row in results[kind] if row["variant"] == variant]


def log_probs(model, ids):
    """The model's predictions after each token, [L, V] in float64."""
    with torch.no_grad():
        return model(ids[None], use_cache=False).logits[0].double().log_softmax(-1)


def test_agreement_is_the_divergence_made_by_hand(tiny, tmp_path):
    """At equally many positions of each eighth, all of a short prompt."""
    ids, positions = torch.randint(3, 99, (700,)), score.sample_positions(700, random.Random(0))
    assert torch.bincount(positions.unique() * 8 // 700).tolist() == [64] * 8
    assert score.sample_positions(101, random.Random(0)).tolist() == [*range(101)]
    compared = list_variants(EvaluationPlan("tiny", tmp_path, (700,), settings=(COARSE,)).validate(), tiny)
    dense = torch.cat(list(score.ForwardPass(tiny, ids).log_probs(positions)))
    p = log_probs(tiny.model, ids)[positions]
    with run_as(tiny.model, compared[1]):
        value = score.compare_predictions(score.ForwardPass(tiny, ids), positions, dense)
        q = log_probs(tiny.model, ids)[positions]
    kl, same, count = (p.exp() * (p - q)).sum(-1), p.argmax(-1) == q.argmax(-1), torch.ones(len(positions))
    assert sum(value["kl"]) > 1e-3
    for name, by_position in (("kl", kl), ("same", same), ("positions", count)):
        by_part = torch.zeros(8, dtype=torch.float64).index_add(0, positions * 8 // 700, by_position.double())
        assert value[name] == pytest.approx(by_part.tolist(), rel=1e-4, abs=1e-5)


def test_answers_are_those_of_the_predictions(demo):
    """An answer is right only if every token is the most likely one."""
    ids = torch.randint(0, 4096, (120,))
    for position in range(100, 105):  # the model's own choice, greedily
        ids[position] = log_probs(demo.model, ids[:position])[-1].argmax()
    likely, spans = log_probs(demo.model, ids), ((100, 105), (99, 105), (102, 103))
    forward = score.ForwardPass(demo, ids)
    value = score.score_answers(forward, Prompt(ids, spans))
    assert value["correct"] == [True, False, True]
    expected = [sum(float(likely[position - 1, ids[position]]) for position in range(*span)) for span in spans]
    assert value["log_likelihood"] == pytest.approx(sum(expected), rel=1e-5)
    assert (value["score"], value["answer_tokens"]) == (pytest.approx(2 / 3), 12)


V2 = "flash-prefill-v2:alpha=1,block=64,first=0,window=0,last=0,dense_layers=1"


@pytest.mark.parametrize("text", ["pbs:keep=1,segment=128,block=64", "pbs:keep=0.3,segment=128,block=64", V2])
def test_a_baseline_computes_every_layer_that_it_does_not_leave_dense(tiny, tmp_path, text):
    dense, baseline = list_variants(EvaluationPlan("tiny", tmp_path, (700,), settings=(text,)).validate(), tiny)
    ids, hidden = torch.randint(3, 99, (700,)), {}
    for variant in (dense, baseline):
        with run_as(tiny.model, variant):
            hidden[variant.name] = score.ForwardPass(tiny, ids).hidden
    layers = list(baseline.last.values())
    assert [stats is None for stats in layers] == [text == V2 and layer < 1 for layer in range(tiny.geometry.layers)]
    densities = [1.0 if stats is None else float(stats.density.mean()) for stats in layers]
    assert collect_run_stats(baseline)["density"] == pytest.approx(sum(densities) / len(layers))
    exact = "keep=1," in text
    assert all((density == 1.0) == (exact or stats is None) for density, stats in zip(densities, layers, strict=True))
    assert torch.allclose(hidden["dense"], hidden[text], atol=1e-4) == exact
    assert tiny.model.config._attn_implementation == "sdpa"
    with run_as(tiny.model, dense):  # nothing of the baseline is left
        assert torch.equal(score.ForwardPass(tiny, ids).hidden, hidden["dense"])


def run_baseline(text, tokens, head_dim, **options):
    """One tensor [1, 2, L, D] as q, k and v of a module's prefill, and what a baseline makes of it, of that shape."""
    module, q, mask = torch.nn.Module(), torch.randn(1, 2, tokens, head_dim), hf.prefill_mask(1, 0)
    module.layer_idx = 0
    setattr(module, BASELINE, Variant("pbs", "pbs", baseline=parse(text)))
    setattr(mask, hf.CALL, hf.PrefillCall(0, None, lambda: None))
    return q, _run_baseline(module, q, q, q, mask, **options)[0].transpose(1, 2)


@pytest.mark.parametrize(
    ("head_dim", "options", "obstacle"),
    [(64, {"softcap": 2.0}, "scores that are soft-capped at 2"), (192, {}, "a head_dim of 192, over 128")],
)
def test_a_baseline_refuses_what_it_cannot_compute(head_dim, options, obstacle):
    with pytest.raises(InputError, match=f"pbs cannot compute {obstacle}: leave this setting out"):
        run_baseline("pbs", 300, head_dim, **options)


def test_the_last_rows_of_a_baseline_are_exact():
    """As many as S2O computes densely by default, one in 32; the rows before them are the baseline's."""
    q, out = run_baseline("pbs:keep=0.2,segment=64,block=64", 640, 64)
    errors = (out - dense_attention(q, q, q)).abs().amax((0, 1, 3))
    assert errors[-20:].max() < 1e-5 < errors[-64:-20].min()


def test_baselines_are_found_in_a_clone(tmp_path, monkeypatch):
    """Also where the packages alone are on the path, as after an editable installation."""
    assert tuple(BASELINES) == plan.BASELINES
    for package in ("calibrate", "s2o_runtime"):
        (tmp_path / package).symlink_to(ROOT / package)
    code = "import sys; from calibrate.evaluation import plan; "
    code += "print(plan.normalise_setting('pbs'), 'scripts' in sys.modules)"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcome = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert outcome.stdout == "pbs True\n", outcome.stderr


def test_predictions_that_are_not_finite_are_named(tiny):
    forward = score.ForwardPass(tiny, torch.randint(3, 99, (100,)))
    forward.hidden[50] = torch.nan
    with pytest.raises(ModelError, match="a prompt of 100 tokens hold inf or NaN, expected finite numbers"):
        list(forward.log_probs(torch.arange(100)))


def read_answers(text):
    """Return the answer of each question that a text's facts answer."""
    forms = ("Who is the {2} in {1}?", "In which city does {0} live now?", "What is the profession of {0}?")
    people = re.findall(r"\n# (\w+ \w+) moved to (\w+) to work as a (\w+)\.\n", text)
    known = [(form.format(*person), person[index]) for person in people for index, form in enumerate(forms)]
    codes = re.findall(r"\n# The secret code for (\S+) is (\d{5})\.\n", text)
    known += [(f"What is the secret code for {key}?", code) for key, code in codes]
    assert len(dict(known)) == len(known)  # each is stated once
    return dict(known)


@pytest.mark.parametrize("task", ["needles", "questions"])
def test_every_question_is_answered_by_the_text(demo, tmp_path, task):
    plan = EvaluationPlan("demo", tmp_path, (1024,), (task,), samples=2, needles=8).validate()
    prompt = build(list_cases(plan, ())[1], plan, demo.tokenizer, ())
    assert (len(prompt.ids), len(prompt.answers)) == (1024, 8)
    text, end = re.split(r"(?=\n# (?:What is|In which|Who is))", demo.tokenizer.decode(prompt.ids), maxsplit=1)
    answers = [demo.tokenizer.decode(prompt.ids[first:end]).strip() for first, end in prompt.answers]
    assert answers == [read_answers(text)[question] for question in re.findall(r"\n# ([^?\n]+\?)", end)]
    assert all(f" {own}.\n" in end for own in answers)
    assert len(set(answers)) > 1


def test_a_users_prompt_is_read_as_it_is_served(tmp_path):
    """A conversation by the chat template, plainly without one, and a template that refuses is named with the line."""
    tokenizer, path = AutoTokenizer.from_pretrained(DEMO_FOLDER), tmp_path / "mine.jsonl"
    talk = {"messages": [{"role": "user", "content": "Is it?"}], "answer": "yes"}
    path.write_text(f"{json.dumps({'text': 'Is it? ', 'answer': 'yes'})}\n{json.dumps(talk)}\n")
    templates = {
        None: "User: Is it?\n\nAssistant: ",
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>": "<user>Is it?<assistant>",
    }
    for tokenizer.chat_template, laid_out in templates.items():
        for prompt, expected in zip(read_user_prompts([path], tokenizer, 100), ("Is it? ", laid_out), strict=True):
            ((first, end),) = prompt.answers
            assert end == prompt.length
            assert list(map(tokenizer.decode, (prompt.ids[:first], prompt.ids[first:]))) == [expected, "yes"]
    tokenizer.chat_template = "{{ raise_exception('be nice') }}"
    with pytest.raises(InputError, match=r"mine.jsonl:2: .*template .*\(be nice\)"):
        read_user_prompts([path], tokenizer, 100)


def test_the_shortest_length_is_checked_for_every_task(demo, tmp_path):
    plan = EvaluationPlan("demo", tmp_path, (256,), ("needles", "agreement"), needles=9).validate()
    with pytest.raises(InputError, match=r"length 256 .* 'needles': use (\d+) tokens") as refused:
        check_lengths(plan, demo.tokenizer)
    enough = replace(plan, lengths=(int(re.search(r"use (\d+) tokens", str(refused.value))[1]),))
    check_lengths(enough, demo.tokenizer)
    for case in list_cases(enough, ()):
        assert len(build(case, enough, demo.tokenizer, ()).ids) == case.length


def die(*arguments):
    """End a process: nothing catches this."""
    raise KeyboardInterrupt


@SLOW
def test_a_killed_run_ends_with_the_same_summary(tiny, tmp_path, monkeypatch):
    def plan(name):
        options = {"settings": (COARSE,), "samples": 2, "needles": 2, "repeats": 1}
        return EvaluationPlan("tiny", tmp_path / name, (512, 600), TASKS, **options)

    whole, killed, put = run(plan("whole"), tiny), plan("killed"), Journal.put
    for survived in (0, 3, 11):  # results are stored, and then the process dies
        puts = iter([put] * survived)
        monkeypatch.setattr(Journal, "put", lambda *given, puts=puts: next(puts, die)(*given))
        with pytest.raises(KeyboardInterrupt):
            run(killed, tiny)
    monkeypatch.setattr(Journal, "put", put)
    before = entries(killed)
    resumed = run(killed, tiny)
    assert entries(killed)[: len(before)] == before
    assert len(before) == 0 + 3 + 11
    assert json.dumps(run(killed, tiny)) == json.dumps(resumed)  # times too: nothing is measured again
    for outcome in (whole, resumed):
        assert len(outcome.pop("time")) == 2 * 2  # lengths x variants
        assert all(row.pop("speedup") > 0 for row in outcome["quality"])
        outcome["prompts"] = [row for row in outcome["prompts"] if row["task"] != "time"]
    assert json.dumps(whole) == json.dumps(resumed).replace("/killed", "/whole")


def test_results_of_other_inputs_are_refused_by_name(tiny, tmp_path):
    plan = EvaluationPlan("tiny", tmp_path, (400,), ("needles",), samples=1, needles=1)
    open_journal(plan, tiny).close()
    with pytest.raises(InputError, match="was made with seed 0, this run has 1: give another --out-dir, or delete it"):
        open_journal(replace(plan, seed=1), tiny)


@SLOW
def test_profiles_run_as_they_are_deployed(tiny, tmp_path):
    files = tuple(tmp_path / f"{name}.safetensors" for name in ("exact", "coarse"))
    for file, tau in zip(files, (0.0, 1000.0), strict=True):
        save_profile(make_profile(tiny.model, tau, min_length=400), file)
    tasks = ("needles", "agreement", "time")
    plan = EvaluationPlan("tiny", tmp_path / "out", (300, 500), tasks, files, needles=1, repeats=1)
    results = run(plan, tiny)
    assert [variant["name"] for variant in results["variants"]] == ["dense", "exact", "coarse"]
    short, long = rows(results, "agreement", "coarse")
    assert (short["kl"], short["density"]) == (pytest.approx(0, abs=1e-8), 1.0)
    assert long["kl"] > 1e-3
    assert rows(results, "agreement", "exact")[1]["kl"] < 1e-8
    reason = "shorter than the shortest calibrated length, 400"
    assert rows(results, "time", "coarse")[0]["dense"] == {reason: 2}
    assert f"coarse at 300 tokens: 2 layers ran dense ({reason})" in report.list_notes(results)
    save_profile(make_profile(tiny.model, 5.0, min_length=300), files[1])  # another profile under the same name
    assert rows(run(plan, tiny), "agreement", "coarse")[0]["kl"] > 1e-6


def test_attention_is_as_fast_as_all_layers_of_a_profile_together():
    def profile(**changes):
        times = {8: [(1.0, 3.0), (1.0, 1.0)], 16: [(1.0, 3.0), (None, None)]}
        layers = {
            at: [dict(zip(("seconds", "dense_seconds"), pair, strict=True)) for pair in times[at]] for at in times
        }
        predicted = [{"length": length, "layers": of_length} for length, of_length in layers.items()]
        return SimpleNamespace(record={"predicted": predicted, **changes})

    variant = Variant("p", "p", profile=profile(budget={"kind": "rel_mse", "value": 3e-3}))
    assert [variant.attention_speedup(length) for length in (8, 16, 32)] == [2, None, None]
    assert variant.budget == "rel_mse 0.003"
    retiled = Variant("p", "p", profile=profile(retiled={"from": "NVIDIA H200", "to": "NVIDIA H100"}))
    assert (retiled.attention_speedup(8), retiled.budget) == (None, None)
    assert Variant("dense", "dense").attention_speedup(8) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tau=much", "setting 'tau=much': tau is 'much': expected a number, such as tau=0.3"),
        ("tau=0.1,segmnt=64", "has 'segmnt=64', expected tau=.., segment=.."),
        ("segment=64", "setting 'segment=64' has no tau"),
        ("tau=1,tau=2", "gives tau twice"),
        ("tau=1,segment=100", "segment 100 is not a multiple of 64: round it"),
    ],
)
def test_a_bad_setting_names_the_part(text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_setting(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (" tail=mean , segment=256, tau=3e-1", "tau=0.3,segment=256,tail=mean"),
        ("segment=64,stop_rule=raw,tau=0", "tau=0,segment=64,stop_rule=paper"),
    ],
)
def test_a_setting_has_one_name(text, name):
    assert normalise_setting(text) == name
    assert parse_setting(name) == parse_setting(text)
