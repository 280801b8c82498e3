"""The certificate of answers without a model: what prompts show of their KL, and what fresh prompts refute."""

import math
import re
import statistics
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from calibrate.prompts.prompt import Prompt
from calibrate.proof import certify_answers as module
from calibrate.proof import recheck, weigh
from calibrate.proof.answers import PromptAnswers
from calibrate.proof.bounds import CONFIDENCE, SPEND_FRACTIONS, bound_mean, compute_attempt_confidence
from calibrate.proof.certify_answers import CAP, EIGHTH_ROOM, SKEW, build_answer_certificate, certify_answers
from calibrate.proof.state import ProblemKind
from calibrate.proof.weigh import spend_answers
from calibrate.recipe import Budget
from calibrate.record import Certificate
from calibrate.report.sections import list_claims
from support.candidates import candidate
from support.executors import CPU, GPU, pretended

BUDGET = 1e-3
FACTORS = 0.8, 1.0, 1.25, 0.9, 1.1, 0.95, 1.05, 0.9  # of the mean KL, by prompt
KINDS = [*"aabbccdd"]
PROMPTS = [Prompt(torch.tensor([number] * 512), ((3, 5),), kind) for number, kind in enumerate(KINDS)]
RECIPE = replace(candidate().recipe, budget=Budget("kl", BUDGET), check_lengths=(), lengths=(512,))
BEGUN = replace(candidate(), recipe=RECIPE)


def answer(kls, worst=1.0, found=4, kept=4):
    """Answers with these KLs, by prompt; about the last eighth so many times that of the others."""
    unit = 8 / (7 + worst)
    return [PromptAnswers((kl * unit,) * 7 + (kl * unit * worst,), (2 * kl,), found, kept) for kl in kls]


def certify(monkeypatch, kl_of, device=CPU, noise_kl=1e-5, **changes):
    """The result, and the shares of what layers spend that were tried; `kl_of` is the mean KL for a share."""
    tried, asked = [], [1.0]

    def spend(source, length, share):
        asked.append(share)
        return spend_answers(source, length, share)

    def measure(prover, prompts, sources, noise=False):
        if noise:
            return [answer([noise_kl] * len(prompts))]
        tried.append(asked[-1])
        return [answer([kl_of(tried[-1]) * factor for factor in FACTORS], **changes)]

    monkeypatch.setattr(module, "spend_answers", spend)
    for used in (module, weigh):
        monkeypatch.setattr(used, "measure_answers", measure)
    return certify_answers(SimpleNamespace(executor=pretended(None, device)), {512: PROMPTS}, BEGUN), tried


def test_answers_whose_bound_holds_spend_what_was_adjusted(monkeypatch):
    result, tried = certify(monkeypatch, lambda share: 0.5 * BUDGET, GPU)
    assert (result.problems, result.chosen, tried) == ((), BEGUN.chosen, [1.0])
    shown, entry = result.certificates[512].answers, result.certificates[512]
    kls = [0.5 * BUDGET * factor for factor in FACTORS]
    confidence = compute_attempt_confidence(1.0, BEGUN.recipe, SKEW)
    assert shown.bound == pytest.approx(bound_mean(kls, KINDS, confidence))
    assert (shown.mean, shown.worst_eighth) == (pytest.approx(statistics.fmean(kls)),) * 2
    assert shown.second_turn == pytest.approx(2 * shown.mean)
    assert (shown.noise, shown.spent, shown.above) == (pytest.approx(1e-5), None, 0)
    assert (entry.groups, entry.tokens, entry.layers) == (8, 8 * 512, None)
    assert (entry.retrieval.found, entry.retrieval.kept) == (32, 32)
    assert [(one.domain, one.groups) for one in entry.domains] == [(kind, 2) for kind in "abcd"]
    assert entry.domains[0].kl == pytest.approx(0.5 * BUDGET * 0.9)
    (claim,) = list_claims(Certificate(confidence=CONFIDENCE, lengths=(entry,)))
    said = r"a KL of 5\.0e-04 nats per token, at most .* \(worst eighth of the prompts 5\.0e-04, second turns 9\.9e-04"
    said += r", two dense kernels 1\.0e-05\); with 95% confidence at most 31\.3% of prompts are above ten times"
    assert re.search(said, claim)


@pytest.mark.parametrize(
    ("kl_of", "tried", "problem"),
    [
        (lambda share: 1.0 * BUDGET * share, [1.0, 0.7], None),  # 0.85 is predicted to be too much
        (lambda share: 1.8 * BUDGET * share, [1.0, 0.35], None),
        (lambda share: 9.0 * BUDGET * share, [1.0, 0.35], "the bound of the answers' mean KL is "),
        (lambda share: math.nan, [*SPEND_FRACTIONS], "the bound of the answers' mean KL is not finite"),
    ],
    ids=["less", "hopeless", "never", "nan"],
)
def test_where_the_bound_is_over_the_budget_all_layers_spend_less(kl_of, tried, problem, monkeypatch):
    result, shares = certify(monkeypatch, kl_of)
    assert shares == tried
    assert result.certificates[512].answers.spent == tried[-1]
    spent, before = (sum(plan.spent for plan in one.chosen[512].choices) for one in (result, BEGUN))
    assert 0.4 * tried[-1] * before < spent <= tried[-1] * before * (1 + 1e-9)
    assert [one.kind for one in result.problems] == [ProblemKind.NOT_SHOWN] * bool(problem)
    assert all(problem in str(one) and "1.0e-03 is allowed" in str(one) for one in result.problems)


def test_looks_that_noise_alone_would_fail_are_spared(monkeypatch):
    """It stays, however little layers spend: without it 60% would look like enough."""
    noise = 0.5 * BUDGET
    result, tried = certify(monkeypatch, lambda share: noise + 0.6 * BUDGET * share, GPU, noise)
    assert (tried, result.met) == ([1.0, 0.35], True)


def test_what_few_questions_or_needles_suffer_is_a_problem_too(monkeypatch):
    result, tried = certify(monkeypatch, lambda share: 0.6 * BUDGET, worst=6.0)
    (problem,) = result.problems
    assert (problem.kind, tried) == (ProblemKind.NOT_SHOWN, [*SPEND_FRACTIONS])
    assert "worst eighth of the prompts is 2.2e-03 nats per token, 2.0e-03 is allowed" in problem.text
    assert certify(monkeypatch, lambda share: 0.6 * BUDGET, worst=2 * EIGHTH_ROOM)[0].met
    (lost,) = certify(monkeypatch, lambda share: 0.5 * BUDGET, kept=2)[0].problems
    assert (lost.kind, lost.length) == (ProblemKind.LOST_NEEDLES, 512)


def test_a_prompt_above_ten_times_the_budget_counts_with_that_and_by_itself():
    """Prompts of one group are one value, and one that is above."""
    prompts = [replace(prompt, group=group) for prompt, group in zip(PROMPTS, [*"vvwwxxyy"], strict=True)]
    kls = [0.5 * BUDGET * factor for factor in FACTORS[:6]] + [1000 * BUDGET, 0.0]
    shown = build_answer_certificate(prompts, answer(kls), BUDGET, 0.95)
    capped = [min(kl, CAP * BUDGET) for kl in kls]
    of_groups = [statistics.fmean(capped[first : first + 2]) for first in range(0, 8, 2)]
    assert shown.bound == pytest.approx(bound_mean(of_groups, [*"abcd"], 0.95))
    assert shown.mean == pytest.approx(statistics.fmean(kls))
    assert shown.above == 1
    exact = stats.binomtest(1, 4).proportion_ci(2 * CONFIDENCE - 1, method="exact")  # one-sided
    assert shown.share_above == pytest.approx(exact.high)
    below = build_answer_certificate(PROMPTS, answer([-1e-9] * 8), BUDGET, 0.95)  # rounding alone
    assert (below.mean, below.bound, below.above) == (0.0, 0.0, 0)


@pytest.mark.parametrize(
    ("times", "far", "problem"),
    [
        (1.0, 0, None),
        (2.1, 0, None),  # the bound for these few does not exclude it
        (10.0, 0, "at 512 tokens answers have a mean KL of 5.0e-03, 0.001 is certified"),
        (1.0, 8, "at 512 tokens 8 of 8 groups of text have a prompt above 10 times the budget"),
    ],
    ids=["same", "chance", "ten times", "far off"],
)
def test_fresh_prompts_refute_a_certificate_that_is_wrong(times, far, problem, monkeypatch):
    proven, _ = certify(monkeypatch, lambda share: 0.5 * BUDGET)
    record = {
        "budget": {"kind": "kl", "value": BUDGET},
        "certificate": {"lengths": [proven.certificates[512].to_json()]},
    }
    profile = replace(proven.build_profile(), record=record)
    kls = [times * 0.5 * BUDGET * factor for factor in np.roll(FACTORS, 3)]
    kls[:far] = [100 * BUDGET] * far
    monkeypatch.setattr(recheck, "measure_answers", lambda *_: [answer(kls)])
    check = recheck._check_answers(None, PROMPTS, profile, recheck.select_certified_lengths(profile)[512])
    assert bool(check.broken) == bool(check.problems) == (problem is not None)
    assert problem is None or any(problem in said for said in check.problems)
    assert (check.groups, check.above, check.mean_kl) == (8, far, pytest.approx(statistics.fmean(kls)))
    shown = [(prompt.domain, prompt.kl, prompt.error_over_limit, prompt.measured) for prompt in check.of_prompts]
    assert shown == [*zip(KINDS, map(pytest.approx, kls), [None] * 8, answer(kls), strict=True)]
