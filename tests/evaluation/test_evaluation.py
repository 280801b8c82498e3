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
import torch.nn.functional as F
from transformers import AutoTokenizer

from calibrate.evaluation import quality_plots as plots
from calibrate.evaluation import report, score, settings
from calibrate.evaluation.plan import TASKS, TEXT, EvaluationPlan
from calibrate.evaluation.results import open_journal, summary
from calibrate.evaluation.run import evaluate
from calibrate.evaluation.settings import named, parsed
from calibrate.evaluation.tasks import SUMMARY, Case, build, cases, check
from calibrate.evaluation.user_prompts import read_user_prompts
from calibrate.evaluation.variants import BASELINE, Variant, _baseline_forward, run_stats, running, variants
from calibrate.journal import Journal
from calibrate.model.models import DEMO_FOLDER, load
from calibrate.prompts.facts import FAMILY
from calibrate.prompts.prompt import Prompt
from s2o_runtime.errors import ConfigError, InputError, ModelError
from s2o_runtime.huggingface import hf
from s2o_runtime.profile import save_profile
from scripts.bench.baselines.settings import BASELINES, parse
from support.artefacts import shared
from support.models import make_profile
from support.pages import ROOT

SLOW = pytest.mark.slow(reason="evaluates a model on all tasks")

EXACT, COARSE = "tau=0,segment=64", "tau=1000,segment=64"


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    """A random model that reads characters."""
    return load(str(tiny_folder), "cpu", resident=True)


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
        tasks = ("needles", "variables", "perplexity", "agreement")
        return EvaluationPlan("demo", folder, (512, 576), tasks, settings=(EXACT, COARSE), samples=1, needles=8)

    whole = plan(shared(tmp_path_factory, "demo-evaluated", lambda folder: run(plan(folder), demo)))
    return whole, run(whole, demo)


def rows(results, kind, variant):
    return [row for row in results[kind] if row["variant"] == variant]


@SLOW
def test_a_setting_that_never_stops_answers_exactly_what_dense_answers(measured):
    plan, results = measured
    answers = {}
    for task, key, value in entries(plan):
        if "correct" in value:
            answers.setdefault(key.pop("variant"), {})[(task, *key.values())] = value["correct"]
    compared = [(answers[EXACT][name], correct) for name, correct in answers["dense"].items()]
    assert len(compared) == 2 * 2  # lengths x tasks
    assert all(mine == theirs for mine, theirs in compared)
    needles = [row for row in rows(results, "retrieval", EXACT) if row["task"] == "needles"]
    assert [(row["found"], row["kept"], row["dense_found"], row["density"]) for row in needles] == [(8, 8, 8, 1.0)] * 2


@SLOW
def test_agreement_is_exact_for_a_setting_that_never_stops_and_not_for_a_coarse_one(measured):
    _, results = measured
    for exact, coarse in zip(rows(results, "agreement", EXACT), rows(results, "agreement", COARSE), strict=True):
        assert exact["kl"] < 1e-8  # rounding of float32 log-probabilities, squared
        assert exact["top1"] == 1
        assert coarse["kl"] > 1e-2
        assert coarse["top1"] < 0.99
        assert coarse["density"] < 0.9
        assert coarse["positions"] == 512
    lost = [row for row in rows(results, "retrieval", COARSE) if row["dense_can"]]
    assert sum(row["kept"] for row in lost) < sum(row["dense_found"] for row in lost)
    for exact in rows(results, "perplexity", EXACT):
        assert exact["perplexity"] == pytest.approx(exact["dense_perplexity"], rel=1e-5)
    assert rows(results, "perplexity", COARSE)[1]["perplexity"] > 1.01 * exact["dense_perplexity"]


def test_rows_and_the_heat_map_are_what_the_lines_say(tiny, tmp_path):
    tasks = ("needles", "alike")
    plan = EvaluationPlan("tiny", tmp_path, (512, 640), tasks, settings=(COARSE,), samples=5, needles=2).validate()
    compared = variants(plan, tiny)
    rng = random.Random(0)
    by_hand = {}
    with open_journal(plan, tiny) as journal:
        for case in cases(plan, ()):
            for variant in compared:
                asked, correct = rng.sample((0, 1), 2), [rng.random() < 0.5, rng.random() < 0.7]
                value = {"correct": correct, "asked": asked, "log_likelihood": [-1.0] * 2, "density": 1.0, "dense": {}}
                journal.put(case.tasks[0], case.key(variant.identity), value)
                by_number = [correct[asked.index(number)] for number in (0, 1)]
                by_hand.setdefault((case.tasks[0], case.length, variant.name), []).append((by_number, correct))
        results = summary(plan, tiny, compared, (), journal)
    for heat in results["heat"]:
        shares = [by_hand["needles", length, heat["variant"]] for length in (512, 640)]
        assert heat["accuracy"] == [[sum(one[0][part] for one in share) / 5 for share in shares] for part in (0, 1)]
    assert plots.pictures(results).keys() == {"needles"}
    for length, pooled in zip((512, 640), results["quality"], strict=True):
        pairs = []
        for task in tasks:
            dense, coarse = (
                [right for _, correct in by_hand[task, length, name] for right in correct] for name in ("dense", COARSE)
            )
            (row,) = [
                row for row in rows(results, "retrieval", COARSE) if (row["task"], row["length"]) == (task, length)
            ]
            assert row["kept"] == sum(map(min, dense, coarse))
            pairs += zip(dense, coarse, strict=True)
        assert (pooled["length"], pooled["variant"], pooled["asked"]) == (length, COARSE, 20)
        assert pooled["lost"] == pairs.count((True, False))
        assert pooled["gained"] == pairs.count((False, True))
        assert pooled["difference"] == pytest.approx(sum(mine - theirs for theirs, mine in pairs) / 20)


def test_perplexity_is_the_cross_entropy(demo):
    ids = torch.randint(0, 4096, (150,))
    value = score.negative_log_likelihood(score.ForwardPass(demo, ids))
    with torch.no_grad():
        logits = demo.model(ids[None], use_cache=False).logits[0, :-1]
    assert value["tokens"] == 149
    assert value["nll"] / value["tokens"] == pytest.approx(float(F.cross_entropy(logits, ids[1:])), rel=1e-5)


def test_agreement_is_the_divergence_made_by_hand(tiny, tmp_path):
    ids = torch.randint(3, 99, (700,))
    positions = torch.arange(5, 700, 3)
    compared = variants(EvaluationPlan("tiny", tmp_path, (700,), settings=(COARSE,)).validate(), tiny)
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
    edges = score.bucket_edges(700)
    assert [position * 8 // 700 for position in edges[:8]] == list(range(8))
    assert [(position - 1) * 8 // 700 for position in edges[1:]] == list(range(8))


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


def generated(model, ids, count):
    """What a model writes greedily, each token by a forward pass over all before it, which is S2O's for the prompt."""
    with torch.no_grad():
        outputs = model.generate(ids[None], max_new_tokens=count, min_new_tokens=count, do_sample=False)
    return outputs[0, len(ids) :].tolist()


@pytest.mark.slow(reason="generates with three models")
def test_greedy_answers_are_those_that_the_models_generate(demo, tmp_path):
    plan = EvaluationPlan("demo", tmp_path, (700,), settings=("tau=20,segment=64", EXACT)).validate()
    dense, *sparse = variants(plan, demo)
    ids = build(Case(("greedy",), 700, 1), plan, demo.tokenizer, ())[0].ids
    with running(demo.model, dense):
        forward = score.ForwardPass(demo, ids, cache=True)
    answer = score.greedy_answer(demo, forward)
    assert answer["tokens"] == generated(demo.model, ids, score.ANSWER)
    assert answer["prefix"] == score.ANSWER
    prefixes = []
    for variant in sparse:
        with running(demo.model, variant):
            forward = score.ForwardPass(demo, ids, cache=True)
            own = generated(demo.model, ids, score.ANSWER)
        prefixes.append(score.greedy_prefix(forward, answer["tokens"])["prefix"])
        alike = [first == second for first, second in zip(own, answer["tokens"], strict=True)]
        assert prefixes[-1] == [*alike, False].index(False)
    assert prefixes[0] < prefixes[1] == score.ANSWER


def test_a_greedy_answer_ends_where_the_model_ends_it(demo, tmp_path, monkeypatch):
    ids = build(Case(("greedy",), 300, 0), EvaluationPlan("demo", tmp_path, (300,)), demo.tokenizer, ())[0].ids
    whole = generated(demo.model, ids, score.ANSWER)
    monkeypatch.setattr(demo.model.generation_config, "eos_token_id", [4095, whole[5]])
    answer = score.greedy_answer(demo, score.ForwardPass(demo, ids, cache=True))
    assert answer["tokens"] == whole[: whole.index(whole[5]) + 1]


@pytest.mark.parametrize(("keep", "same"), [(1.0, True), (0.3, False)])
def test_a_baseline_computes_every_layer_of_full_attention(tiny, tmp_path, keep, same):
    text = f"pbs:keep={keep},segment=128,block=64"
    plan = EvaluationPlan("tiny", tmp_path, (700,), settings=(text,)).validate()
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


def test_a_baseline_leaves_its_first_layers_dense(tiny, tmp_path):
    """Of FlashPrefill V2 those that it names; they count as dense in what the run did."""
    text = "flash-prefill-v2:alpha=1,block=64,first=0,window=0,last=0,dense_layers=1"
    baseline = variants(EvaluationPlan("tiny", tmp_path, (700,), settings=(text,)).validate(), tiny)[1]
    with running(tiny.model, baseline):
        score.ForwardPass(tiny, torch.randint(3, 99, (700,)))
    first, *others = baseline.last.values()
    densities = [float(stats.density.mean()) for stats in others]
    assert first is None
    assert len(densities) == tiny.geometry.layers - 1
    assert max(densities) < 0.9
    assert run_stats(baseline).density == pytest.approx((1 + sum(densities)) / tiny.geometry.layers)


@pytest.mark.parametrize(
    ("head_dim", "options", "obstacle"),
    [(64, {"softcap": 2.0}, "scores that are soft-capped at 2"), (192, {}, "a head_dim of 192, over 128")],
)
def test_a_baseline_refuses_what_it_cannot_compute(head_dim, options, obstacle):
    variant, module = Variant("pbs", "pbs", baseline=parse("pbs")), torch.nn.Module()
    module.layer_idx = 0
    setattr(module, BASELINE, variant)
    q, mask = torch.randn(1, 2, 300, head_dim), hf.prefill_mask(1, 0)
    setattr(mask, hf.CALL, hf.PrefillCall(0, None, lambda: None))
    with pytest.raises(InputError, match=f"pbs cannot compute {obstacle}: leave this setting out"):
        _baseline_forward(module, q, q, q, mask, **options)


def test_baselines_are_found_in_a_clone_only(tmp_path, monkeypatch):
    """Also where the packages alone are on the path, as after an editable installation."""
    assert tuple(BASELINES) == settings.BASELINES
    for package in ("calibrate", "s2o_runtime"):
        (tmp_path / package).symlink_to(ROOT / package)
    code = "import sys; from calibrate.evaluation.settings import named; print(named('pbs'), 'scripts' in sys.modules)"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcome = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert outcome.stdout == "pbs True\n", outcome.stderr
    monkeypatch.setattr(settings, "REPOSITORY", tmp_path)
    assert settings.named("tau=1") == "tau=1"
    with pytest.raises(InputError, match="the baselines are in the repository, not in the package: run from a clone"):
        settings.named("pbs:keep=0.9")


def test_predictions_that_are_not_finite_are_named(tiny):
    forward = score.ForwardPass(tiny, torch.randint(3, 99, (100,)))
    forward.hidden[50] = torch.nan
    with pytest.raises(ModelError, match="a prompt of 100 tokens hold inf or NaN, expected finite numbers"):
        score.negative_log_likelihood(forward)


def asked_in(demo, tmp_path, task, count=8):
    """A prompt of a task, 1024 tokens long: its text before the questions, these, and their answers in order."""
    plan = EvaluationPlan("demo", tmp_path, (1024,), (task,), samples=2, needles=count).validate()
    prompt, asked = build(cases(plan, ())[1], plan, demo.tokenizer, ())
    assert len(prompt.ids) == 1024
    assert sorted(asked) == list(range(count))
    answers = [demo.tokenizer.decode(prompt.ids[first:last]).strip() for first, last in prompt.answers]
    text = demo.tokenizer.decode(prompt.ids)
    begin = re.search(r"\n# (What is|How many|In which|Who is)", text).start()
    return text[:begin], text[begin:], dict(zip(asked, answers, strict=True))


@pytest.mark.parametrize("task", ["needles", "alike"])
def test_every_code_that_is_asked_for_stands_in_the_text_once(demo, tmp_path, task):
    text, end, answers = asked_in(demo, tmp_path, task)
    stated = re.findall(r"\n# The secret code for (\S+) is (\d{5})\.\n", text)
    questions = re.findall(r"\n# What is the secret code for (\S+)\? The secret code for (\S+) is (\d{5})\.\n", end)
    assert {(word, code) for word, _, code in questions} == set(stated)
    assert [answers[number] for number in range(8)] == [code for _, code in stated]  # numbers follow the text
    if task == "alike":
        for key, _ in stated:
            different = [sum(a != b for a, b in zip(key, other, strict=False)) for other, _ in stated]
            assert different.count(1) == FAMILY - 1  # and itself


def test_chains_lead_from_every_variable_that_is_asked_for_to_its_code(demo, tmp_path):
    text, end, answers = asked_in(demo, tmp_path, "variables")
    known = {}
    for name, _, value in re.findall(r"\n# VAR (\w+) = (VAR )?(\w+)\.\n", text):  # what is referred to came before
        known[name] = (known[value][0], known[value][1] + 1) if value in known else (value, 0)
    questions = re.findall(r"# What is the value of VAR (\w+)\? The value of VAR (\w+) is (\d{5})\.\n", end)
    assert len(known) == 12
    assert [known[name][0] for name, _, _ in questions] == [code for _, _, code in questions]
    assert sorted(known[name][1] for name, _, _ in questions) == [1] * 4 + [2] * 4
    assert sorted(answers.values()) == sorted(code for _, _, code in questions)


def test_notes_are_as_many_as_the_answers_say(demo, tmp_path):
    text, end, answers = asked_in(demo, tmp_path, "counting")
    questions = re.findall(r"How many notes on (\w+) are there\? The number of notes on \w+ is (\d)\.\n", end)
    assert [text.count(f"\n# A note on {word}.\n") for word, _ in questions] == [int(times) for _, times in questions]
    assert list(answers.values()) == [times for _, times in questions]
    assert len(set(answers.values())) > 1


def test_questions_are_answered_by_a_sentence_of_the_text(demo, tmp_path):
    text, end, answers = asked_in(demo, tmp_path, "questions", 9)
    people = re.findall(r"\n# (\w+ \w+) moved to (\w+) to work as a (\w+)\.\n", text)
    assert len({(city, job) for _, city, job in people}) == len({name for name, _, _ in people}) == 9
    for number, (name, city, job) in enumerate(people):
        question, expected = (
            (f"In which city does {name} live now? {name} lives in {city}.", city),
            (f"What is the profession of {name}? {name} is a {job}.", job),
            (f"Who is the {job} in {city}? The {job} in {city} is {name}.", name),
        )[number % 3]
        assert f"\n# {question}\n" in end
        assert answers[number] == expected


def test_a_users_prompt_is_read_as_it_is_served(tmp_path):
    """A conversation by the chat template, plainly without one, and a template that refuses is named with the line."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    path = tmp_path / "mine.jsonl"
    talk = {"messages": [{"role": "user", "content": "Is it?"}], "answer": "yes"}
    path.write_text(f"{json.dumps({'text': 'Is it? ', 'answer': 'yes'})}\n{json.dumps(talk)}\n")
    templates = {
        None: "User: Is it?\n\nAssistant: ",
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>": "<user>Is it?<assistant>",
    }
    for template, laid_out in templates.items():
        tokenizer.chat_template = template
        prompts = read_user_prompts([path], tokenizer, 100)
        for prompt, expected in zip(prompts, ("Is it? ", laid_out), strict=True):
            ((first, end),) = prompt.answers
            assert tokenizer.decode(prompt.ids[:first]) == expected
            assert (tokenizer.decode(prompt.ids[first:]), end) == ("yes", prompt.length)
    tokenizer.chat_template = "{{ raise_exception('be nice') }}"
    with pytest.raises(InputError, match=r"mine.jsonl:2: the tokenizer's chat template does not take .*\(be nice\)"):
        read_user_prompts([path], tokenizer, 100)


def test_the_text_of_a_greedy_answer_ends_with_a_request(demo, tmp_path):
    plan = EvaluationPlan("demo", tmp_path, (300,)).validate()
    prompt, _ = build(Case(("perplexity", "greedy"), 300, 0), plan, demo.tokenizer, ())
    assert len(prompt.ids) == 300
    assert demo.tokenizer.decode(prompt.ids).endswith(SUMMARY)


def test_a_length_too_short_for_a_task_names_one_that_is_not(demo, tmp_path):
    plan = EvaluationPlan("demo", tmp_path, (256,), ("needles", "perplexity"), needles=9).validate()
    with pytest.raises(InputError, match=r"length 256 is too short for the task 'needles': use \d+ tokens") as refused:
        check(plan, demo.tokenizer)
    enough = replace(plan, lengths=(int(re.search(r"use (\d+) tokens", str(refused.value))[1]),))
    check(enough, demo.tokenizer)
    for case in cases(enough, ()):
        asked, _ = build(case, enough, demo.tokenizer, ())
        stated = re.findall(r"# The secret code for \w+ is \d{5}\.\n", demo.tokenizer.decode(asked.ids))
        assert len(stated) == (9 if case.tasks == ("needles",) else 0)


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
        options = {"settings": (COARSE,), "samples": 2, "needles": 2, "repeats": 1}
        return EvaluationPlan("tiny", tmp_path / name, (512, 600), ("needles", "alike", *TEXT, "time"), **options)

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
    for outcome in (whole, resumed):
        assert all(row.pop("speedup") > 0 for row in outcome["quality"])
        outcome["prompts"] = [row for row in outcome["prompts"] if row["task"] != "time"]
    assert json.dumps(whole) == json.dumps(resumed).replace("/killed", "/whole")
    assert [sorted(row) for row in times[0]] == [sorted(row) for row in times[1]]


def test_results_of_other_inputs_are_refused_by_name(tiny, tmp_path):
    plan = EvaluationPlan("tiny", tmp_path, (400,), ("needles",), samples=1, needles=1)
    run(plan, tiny)
    with pytest.raises(InputError, match="was made with seed 0, this run has 1: give another --out-dir, or delete it"):
        run(replace(plan, seed=1), tiny)


@SLOW
def test_profiles_run_as_they_are_deployed(tiny, tmp_path):
    for name, tau in (("exact", 0.0), ("coarse", 1000.0)):
        save_profile(make_profile(tiny.model, tau, min_length=400), tmp_path / f"{name}.safetensors")
    files = tuple(tmp_path / f"{name}.safetensors" for name in ("exact", "coarse"))
    plan = EvaluationPlan(
        "tiny", tmp_path / "out", (300, 500), ("needles", "agreement", "time"), files, needles=1, repeats=1
    )
    results = run(plan, tiny)
    assert [variant["name"] for variant in results["variants"]] == ["dense", "exact", "coarse"]
    short, long = rows(results, "agreement", "coarse")
    assert (short["kl"], short["density"]) == (pytest.approx(0, abs=1e-8), 1.0)
    assert long["kl"] > 1e-3
    assert rows(results, "agreement", "exact")[1]["kl"] < 1e-8
    assert rows(results, "time", "coarse")[0]["dense"] == {"shorter than the shortest calibrated length, 400": 2}
    assert "coarse at 300 tokens: 2 layers ran dense (shorter than the shortest calibrated length, 400)" in (
        report.notes(results)
    )
    assert tiny.model.config._attn_implementation == "sdpa"
    save_profile(make_profile(tiny.model, 5.0, min_length=300), files[1])  # another profile under the same name
    assert rows(run(plan, tiny), "agreement", "coarse")[0]["kl"] > 1e-6


def test_attention_is_as_fast_as_all_layers_of_a_profile_together():
    def profile(**changes):
        lengths = {8: [(1.0, 3.0), (1.0, 1.0)], 16: [(1.0, 3.0), (None, None)]}
        predicted = [
            {"length": length, "layers": [{"seconds": own, "dense_seconds": dense} for own, dense in layers]}
            for length, layers in lengths.items()
        ]
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
        ("tau=0.1,far", "has 'far', expected"),
        ("tau=0.1,far=yes", "far 'yes' is not known: use one of"),
        ("segment=64", "setting 'segment=64' has no tau"),
        ("tau=1,tau=2", "gives tau twice"),
        ("tau=1,segment=100", "segment 100 is not a multiple of 64: round it"),
        ("tau=-1", "tau -1.0 is out of range"),
        ("tau=1,stop_rule=last", "stop_rule 'last' is not known: use one of rest, paper"),
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
        ("tau=0.3,segment=1024,representatives=32,far=mean", "tau=0.3,segment=1024,representatives=32,far=mean"),
        (" far=mean , segment=256, tau=3e-1", "tau=0.3,segment=256,far=mean"),
        ("grain=4,stop_rule=raw,tau=0", "tau=0,grain=4,stop_rule=paper"),
        ("far=linear,segment=512", "segment=512,far=linear"),
    ],
)
def test_a_setting_has_one_name(text, name):
    assert named(text) == name
    assert parsed(name) == parsed(text)
