"""RULER's tasks: lm_eval's own prompts and scores without its packages, judged and pooled as by hand."""

import importlib.util
import json
import random
import sys
from itertools import product

import pytest
import torch

from calibrate.commands.profile import main
from calibrate.evaluation import report, ruler
from calibrate.evaluation.paired import adjust_holm
from calibrate.evaluation.plan import EvaluationPlan
from calibrate.evaluation.results import open_journal, summarise
from calibrate.evaluation.run import Evaluation, evaluate, list_variants
from calibrate.evaluation.score import ForwardPass, score_ruler
from calibrate.evaluation.tasks import Case
from calibrate.model.models import load_tokenizer
from s2o_runtime.errors import InputError, ResourceError
from s2o_runtime.files import hash_file
from support.pages import DEMO_PROFILE, ROOT
from support.processes import called, refusal

COARSE = "tau=1000,segment=64"
TINY = 2048  # tokens of the shortest prompts


@pytest.fixture(scope="module")
def tokenizer():
    """The demo model's; lm_eval's files are imported with few adjectives, of which it sorts six million pairs."""
    words = pytest.importorskip("wonderwords", reason=f"wonderwords is not installed: {ruler.INSTALL}")
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip(f"lm_eval is not installed: {ruler.INSTALL}")

    class FewWords(words.RandomWord):
        def __init__(self):
            super().__init__()
            self._categories["adjectives"] = self._categories["adjectives"][:9]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "RandomWord", FewWords)
        ruler.load_generators()
    assert not [name for name in sys.modules if name.startswith(ruler.PACKAGE)]
    return load_tokenizer("demo")


@pytest.mark.parametrize("task", ruler.TASKS)
def test_a_prompt_is_as_long_as_asked_and_tells_its_answer(tokenizer, task):
    """Common words leave room for an example that lm_eval does not show: an eighth of the prompt."""
    question = ruler.make_question(tokenizer, task, 16384, 0, count=1, seed=0)
    assert (0.85 if task == "ruler_cwe" else 0.9) * 16384 <= len(question.ids) <= 16384
    text, answer = tokenizer.decode(question.ids), tokenizer.decode(question.answer)
    words = [word for word in answer.split() if not (task == "ruler_cwe" and word.endswith("."))]
    assert all(word in text for word in words)
    assert len(words) == {"ruler_vt": 5, "ruler_cwe": 10, "ruler_fwe": 3}.get(task, 1)
    assert question.score(f"It is{answer.upper()}, I think") == 1
    assert question.score(words[0]) == pytest.approx(1 / len(words))
    assert question.score("") == 0


def test_a_seed_makes_the_same_prompts_however_many(tokenizer):
    def ids(sample, count, seed):
        ruler._draw_rows.cache_clear()
        random.seed(count)  # whatever was drawn before
        return ruler.make_question(tokenizer, "ruler_cwe", TINY, sample, count=count, seed=seed).ids.tolist()

    assert ids(0, 1, seed=3) == ids(0, 2, seed=3) != ids(1, 2, seed=3)
    assert ids(0, 1, seed=4) != ids(0, 1, seed=3)


def test_what_has_no_prompts_is_refused(tokenizer, tiny_folder, monkeypatch):
    with pytest.raises(InputError, match="length 1024 is too short for the task 'ruler': use 2048 tokens or more"):
        ruler.make_question(tokenizer, "ruler_vt", 1024, 0, count=1, seed=0)
    with pytest.raises(InputError, match=r"the tokenizer makes \d+ tokens of RULER's example, expected 470 at most"):
        ruler.make_question(load_tokenizer(str(tiny_folder)), "ruler_vt", TINY, 0, count=1, seed=0)
    assert {*ruler.INSTALL.split()[3:]} <= {*(ROOT / "constraints.txt").read_text().splitlines()}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ResourceError, match=r"needs lm_eval and wonderwords, .*: pip install --no-deps lm_eval==0.4"):
        ruler.load_generators.__wrapped__()


def test_an_answer_ends_where_it_is_whole_or_the_model_ends_it(demo, monkeypatch):
    """Whatever its draft is, which saves the passes of its right tokens."""
    ids, passes, write_on = torch.randint(0, 4096, (64,)), [], ForwardPass.write_on
    written = demo.model.generate(ids[None], max_new_tokens=6, min_new_tokens=6, do_sample=False)[0, 64:].tolist()
    texts = [demo.tokenizer.decode(written[:count], skip_special_tokens=True) for count in range(7)]
    monkeypatch.setattr(ForwardPass, "write_on", lambda *given: (passes.append(t) or t for t in write_on(*given)))

    def write(score, right=0):
        draft = written[:right] + [(token + 1) % 4096 for token in written[right:]]
        return score_ruler(demo, ForwardPass(demo, ids, cache=True), ruler.RulerQuestion(ids, [1, 2], 6, score), draft)

    for right in (6, 5, 3, 0):
        passes.clear()
        whole = write(lambda text: 0.5, right)
        assert (whole["score"], whole["text"], whole["answer_tokens"]) == (0.5, texts[6], 2)
        assert passes == written[right + 1 :]
    assert write(lambda text: float(text == texts[3]))["text"] == texts[3]
    monkeypatch.setattr(demo.model.generation_config, "eos_token_id", [4095, written[1]])
    assert write(lambda text: 0.0)["text"] == texts[written.index(written[1]) + 1]


@pytest.mark.slow(reason="reads and writes with the demo model")
def test_every_variant_answers_behind_its_own_prompt_with_dense_attention(tokenizer, demo, tmp_path, monkeypatch):
    task = ruler.RulerTask("fwe_utils", "fwe_download", 5)
    monkeypatch.setattr(ruler, "TASKS", {"ruler_fwe": task})
    plan = EvaluationPlan("demo", tmp_path, (TINY,), ("ruler",), settings=(COARSE,), ruler_prompts=1).validate()
    compared = list_variants(plan, demo)
    with open_journal(plan, demo) as journal:
        evaluation = Evaluation(plan, demo, compared, (), journal)
        evaluate(evaluation, progress=False)
        results = summarise(evaluation)
    dense, coarse = results["prompts"]
    question = ruler.make_question(tokenizer, "ruler_fwe", TINY, 0, count=1, seed=0)
    count = len(question.ids)
    whole = torch.cat([question.ids, torch.tensor(question.answer)])
    likely = demo.model(whole[None]).logits[0, count - 1 : -1].double().log_softmax(-1)
    by_hand = sum(float(row[token]) for row, token in zip(likely, question.answer, strict=True))
    assert dense["log_likelihood"] == pytest.approx(by_hand, rel=1e-4)
    assert (dense["density"], coarse["density"] < 0.9) == (1, True)
    assert coarse["log_likelihood"] != pytest.approx(by_hand, rel=1e-3)


def test_tasks_are_judged_listed_and_pooled_as_by_hand(demo, tmp_path):
    """Dense at 19% and 99% is listed; the pool is the mean of judged tasks; McNemar where scores are 0 or 1."""
    scores = {  # of dense, and of the variant
        "niah_single_1": ([1.0] * 99 + [0.0], [1.0] * 100),
        "niah_multikey_2": ([1.0] * 60 + [0.0] * 40, [1.0] * 50 + [0.0] * 50),
        "ruler_vt": ([0.6] * 100, [0.6, 0.4] * 50),
        "ruler_cwe": ([0.19] * 100, [0.5] * 100),
        "needles": ([1.0] * 100, [0.75] * 100),
        "questions": ([0.1] * 100, [0.1, 0.0] * 50),
    }
    tasks = ("needles", "questions", "ruler")
    plan = EvaluationPlan("demo", tmp_path, (TINY,), tasks, settings=(COARSE,), samples=100).validate()
    compared = list_variants(plan, demo)
    with open_journal(plan, demo) as journal:
        for (task, of_task), (at, variant) in product(scores.items(), enumerate(compared)):
            value = {"log_likelihood": -2.0 - at / 2, "answer_tokens": 2, "density": 1.0, "dense": {}}
            for sample, score in enumerate(of_task[at]):
                journal.put(task, Case(task, TINY, sample).key(variant.identity), value | {"score": score})
        results = summarise(Evaluation(plan, demo, compared, (), journal))
    (pooled,) = results["ruler_pooled"]
    (quality,) = results["quality"]  # of both tasks of questions, judged or not
    assert [quality[name] for name in ("score", "dense_score", "difference")] == pytest.approx([0.4, 0.55, -0.15])
    rows = {row["task"]: row for row in results["answers"] if row["variant"] == COARSE}
    judged = {name: row for name, row in rows.items() if row["judged"] and name in ruler.TASKS}
    assert rows["questions"]["log_likelihood"] == pytest.approx(-1.25)
    assert (pooled["judged"], pooled["listed"]) == ([*judged], ["niah_single_1", "ruler_cwe"])
    assert [*judged] == ["niah_multikey_2", "ruler_vt"]
    assert judged["niah_multikey_2"]["p"] == pytest.approx(2 * 0.5**10)
    assert [row["p_holm"] for row in judged.values()] == adjust_holm([row["p"] for row in judged.values()])
    assert pooled["worse"] == [*judged]
    assert [pooled[name] for name in ("score", "dense_score", "difference")] == pytest.approx([0.5, 0.6, -0.1])
    assert -0.14 < pooled["low"] < pooled["difference"] < pooled["high"] < -0.06
    assert [pooled["nats"][name] for name in ("difference", "low", "high")] == pytest.approx([-0.25] * 3)
    line = report.describe_ruler(pooled)
    assert "dense 60.0%, patched 50.0%, difference in points -10.0 (" in line
    assert "niah_multikey_2, ruler_vt significantly worse by Holm; 2 tasks judged, 2 tasks listed" in line


def test_a_card_has_the_line_of_its_own_profile(tmp_path):
    pooled = {"judged": [], "listed": ["ruler_vt"], "worse": [], "variant": "p", "length": 32768}
    pooled["nats"] = {"difference": -0.001, "low": -0.002, "high": 0.0}
    summary = {"variants": [{"name": "p", "identity": hash_file(DEMO_PROFILE)}], "ruler_pooled": [pooled]}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "other.json").write_text(json.dumps(summary | {"variants": []}))
    flags = ["card", DEMO_PROFILE, "--evaluation"]
    assert called(main, *flags, "summary.json", cwd=tmp_path).returncode == 0
    for suffix in (".md", ".html"):
        page = (tmp_path / DEMO_PROFILE.name).with_suffix(suffix).read_text()
        assert "RULER at 32768 tokens: 0 tasks judged, 1 task listed" in page
    said = refusal(called(main, *flags, "other.json", cwd=tmp_path), "s2o-profile")
    assert "other.json has nothing on" in said
