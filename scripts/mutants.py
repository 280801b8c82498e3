#!/usr/bin/env python3
"""Mutants: mistakes that somebody could make in one line, and the tests that must notice them.

    python -m scripts.mutants                  applies every mutant, one at a time, to a copy of the sources
    python -m scripts.mutants --only rank      those whose names contain the text
    python -m scripts.mutants --list           what there is, without running it

A mutant is one replacement in one file. Its tests run first in a copy without it and must pass there; with it they
must fail. Exit code 1 names the mutants that survive: their tests say less than they seem to. `make mutants` keeps the
output in docs/results/mutants.txt.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("s2o_runtime", "calibrate", "scripts", "tests", "profiles", "docs", "pyproject.toml")
FAILED = 1  # pytest's exit code for tests that failed; others say that nothing was tested
SECONDS = 300  # that the tests of one mutant may take


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        name: what goes wrong, as a few words.
        path: the file, from the root of the repository.
        before, after: what is replaced, which occurs once in the file, and by what.
        tests: what pytest is called with; one of them must fail.
    """

    name: str
    path: str
    before: str
    after: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """The file's text with the mistake. Raises ValueError if what is replaced does not occur exactly once."""
        if text.count(self.before) != 1:
            raise ValueError(
                f"mutant {self.name!r}: {self.path} has {self.before!r} {text.count(self.before)} times, expected one: "
                "bring the mutant up to date"
            )
        return text.replace(self.before, self.after)


ALLOCATE, ALLOCATE_TESTS = "calibrate/search/allocate.py", ("tests/search/test_allocate.py",)
BOUNDS, BOUNDS_TESTS = "calibrate/proof/bounds.py", ("tests/proof/test_bounds.py",)
CERTIFY, CERTIFY_TESTS = "calibrate/proof/certify.py", ("tests/proof/test_certify.py",)
ADJUST, ADJUST_TESTS = "calibrate/proof/adjust.py", ("tests/proof/test_adjust.py",)
PROFILE, PROFILE_TESTS = "s2o_runtime/profile/profile.py", ("tests/profile/test_profile.py",)
PROFILE_FILE = "s2o_runtime/profile/file.py"
HF, HF_TESTS = "s2o_runtime/huggingface/hf.py", ("tests/huggingface/test_hf.py", "-m", "not slow and not exhaustive")
WINDOWED, WINDOWED_TESTS = "s2o_runtime/attention/windowed.py", ("tests/attention/test_windowed.py", "-k", "naive")
REFERENCE, REFERENCE_TESTS = "s2o_runtime/reference/attention.py", ("tests/reference/test_reference.py",)
PLAN, PLAN_TESTS = "s2o_runtime/serving/plan.py", ("tests/serving/test_vllm_plan.py",)
BATCH, BATCH_TESTS = "s2o_runtime/vllm/batch.py", ("tests/serving/test_vllm_backend.py",)
CALLS = "s2o_runtime/serving/calls.py"
FIT, FIT_TESTS = "s2o_runtime/serving/fit.py", ("tests/serving/test_vllm_fit.py",)
BACKENDS_TESTS = ("tests/serving/test_backends.py",)

MUTANTS = (
    # the allocation of a budget over heads
    Mutant(
        "a step that costs exactly what is left is refused",
        ALLOCATE, "price <= left", "price < left", ALLOCATE_TESTS,
    ),
    Mutant(
        "the budget is not multiplied by the layers that share it",
        ALLOCATE, "budget * len(layers)", "budget", ALLOCATE_TESTS,
    ),
    Mutant(
        "one head may spend all of its layer's budget",
        ALLOCATE, "if point.mse * weight <= most", "if point.mse * weight <= budget", ALLOCATE_TESTS,
    ),
    Mutant(
        "the hull of a head's points is the upper one",
        ALLOCATE, "<= _slope(hull[-2], point)", ">= _slope(hull[-2], point)", ALLOCATE_TESTS,
    ),
    Mutant(
        "a head takes a later step of its hull without the earlier one",
        ALLOCATE, "blocked.add(head)  #", "pass  #", ALLOCATE_TESTS,
    ),
    Mutant(
        "what a head already spent is paid again for a point between corners",
        ALLOCATE, "(point.mse - chosen[head].mse) * weights[head] <= left", "point.mse * weights[head] <= left",
        ALLOCATE_TESTS,
    ),
    Mutant(
        "the guard on rows refuses a head that is exactly at it",
        ALLOCATE, "  if row <= limit\n", "  if row < limit\n", ALLOCATE_TESTS,
    ),
    Mutant(
        "rounding of int8 scores is not taken from the budget",
        ALLOCATE, "left = budget - sum(point.mse * weight", "left = budget - sum(0 * point.mse * weight",
        ALLOCATE_TESTS,
    ),
    # the bounds of the certificate
    Mutant(
        "one text more than the binomial test admits may be outside",
        BOUNDS, "betaincinv(count - above, above + 1, risk)", "betaincinv(count - above + 1, above, risk)",
        BOUNDS_TESTS,
    ),
    Mutant(
        "every length has the whole risk of the means",
        BOUNDS, "(layers * len(recipe.all_lengths) * passes)", "(layers * passes)", BOUNDS_TESTS,
    ),
    Mutant(
        "every layer has the whole risk of the means",
        BOUNDS, "(layers * len(recipe.all_lengths) * passes)", "(len(recipe.all_lengths) * passes)", BOUNDS_TESTS,
    ),
    Mutant(
        "kinds with few texts have each its own variance",
        BOUNDS, "[max(variance, squares / degrees * m**2)", "[variance", BOUNDS_TESTS,
    ),
    Mutant(
        "the upper bound is for the median instead of the mean",
        BOUNDS, "means, variances = [statistics.fmean(group)", "means, variances = [statistics.median(group)",
        BOUNDS_TESTS,
    ),
    Mutant(
        "the lower bound is an upper one",
        BOUNDS, "max(0.0, mean - _quantile(", "max(0.0, mean + _quantile(", BOUNDS_TESTS,
    ),
    Mutant(
        "what differs between kinds of text widens a bound",
        BOUNDS, "variances = [statistics.fmean(group) for group in groups], [statistics.variance(group)",
        "variances = [statistics.fmean(group) for group in groups], [statistics.variance(values)", BOUNDS_TESTS,
    ),
    Mutant(
        "a two-sided interval has the whole risk on each side",
        BOUNDS, "tail = (1 - confidence) / 2", "tail = 1 - confidence", BOUNDS_TESTS,
    ),
    Mutant(
        "the first look spends the whole risk, and the others theirs on top",
        BOUNDS, "part = 0.5 if step == STEPS[0]", "part = 1.0 if step == STEPS[0]", BOUNDS_TESTS,
    ),
    Mutant(
        "each later look spends the risk that they share",
        BOUNDS, "0.5 / (len(STEPS) - 1)", "0.5", BOUNDS_TESTS,
    ),
    Mutant(
        "a step is hopeless as soon as the first bound expects it over the limit",
        CERTIFY, "HOPELESS * limit and step", "limit and step", CERTIFY_TESTS,
    ),
    Mutant(
        "the last step is passed over too",
        CERTIFY, "HOPELESS * limit and step < len(STEPS) - 1", "HOPELESS * limit", CERTIFY_TESTS,
    ),
    Mutant(
        "prompts go on with what a layer is left with",
        CERTIFY, "self.layers[layer], self._step = left, 0\n        return again",
        "self.layers[layer], self._step = left, 0\n        return None", CERTIFY_TESTS,
    ),
    Mutant(
        "a prompt of a known group counts by itself",
        CERTIFY, "(prompt.domain, prompt.group or number)", "number", CERTIFY_TESTS,
    ),
    Mutant(
        "the rows that answer are not looked at",
        CERTIFY, "[prompt.largest(budget) / limit", "[prompt.error(budget) / limit", CERTIFY_TESTS,
    ),
    Mutant(
        "the KL of a prompt does not count",
        CERTIFY, "[max(pair) for pair in zip(self.errors", "[min(pair) for pair in zip(self.errors", CERTIFY_TESTS,
    ),
    Mutant(
        "the path goes on behind a look that failed",
        CERTIFY, "            return taken or (means, seen)\n", "            continue\n", CERTIFY_TESTS,
    ),
    Mutant(
        "a group of documents is split between the sets",
        "calibrate/prompts/prompts.py", "free.remove(name)", "pass", ("tests/prompts/test_prompts.py",),
    ),
    # what a layer may spend
    Mutant(
        "a layer is given its whole limit, without the margin",
        ADJUST, "times = recipe.margin * limit / largest", "times = limit / largest", ADJUST_TESTS,
    ),
    Mutant(
        "a layer is given what brings its bound to the limit itself",
        ADJUST, "AIM * limit / max(bound,", "limit / max(bound,", ADJUST_TESTS,
    ),
    Mutant(
        "the bound that is expected is not looked at",
        ADJUST, "if texts >= ENOUGH:", "if texts < 0:", ADJUST_TESTS,
    ),
    Mutant(
        "the bounds of a few certify prompts decide",
        ADJUST, "if texts >= ENOUGH:", "if texts > 0:", ADJUST_TESTS,
    ),
    Mutant(
        "a change may be as large as the curves say",
        ADJUST, "min(times, MOST)", "times", ADJUST_TESTS,
    ),
    Mutant(
        "rows at the guard exactly are off too far",
        ADJUST, "if proof.worst > (candidate.recipe.worst_rows", "if proof.worst >= (candidate.recipe.worst_rows",
        ADJUST_TESTS,
    ),
    Mutant(
        "rows that are off too far let a layer be given more",
        ADJUST, "1 / CLOSE**2 if self.tries[key] else 1.0", "times", ADJUST_TESTS,
    ),
    Mutant(
        "a layer's spending is changed once more than it may",
        ADJUST, "self.tries[key] == TRIES", "self.tries[key] > TRIES", ADJUST_TESTS,
    ),
    Mutant(
        "a layer that was tightened is given more again",
        ADJUST, " or (before and before.tightened)", "", ADJUST_TESTS,
    ),
    Mutant(
        "layers under a budget in KL are given more too",
        ADJUST, " or candidate.recipe.budget.is_kl", "", ADJUST_TESTS,
    ),
    # profiles
    Mutant(
        "a file is written in place instead of renamed",
        "s2o_runtime/files.py", "os.replace(temporary, path)",
        "path.write_bytes(data)\n        os.unlink(temporary)", PROFILE_TESTS,
    ),
    Mutant(
        "the digest leaves the tensors out",
        PROFILE_FILE, "digest.update(tensor_bytes(tensor))", "pass", PROFILE_TESTS,
    ),
    Mutant(
        "between unlike buckets the larger threshold is taken",
        PROFILE, "tau=min(near.tau, distant.tau)", "tau=max(near.tau, distant.tau)", PROFILE_TESTS,
    ),
    Mutant(
        "thresholds are mixed although the buckets check the stop unlike",
        PROFILE, "return config.tile.block_m, config.tile.stride, config.grain",
        "return config.tile.block_m, config.grain", PROFILE_TESTS,
    ),
    Mutant(
        "the shortest calibrated length itself is too short",
        "s2o_runtime/serving/layer.py", "if keys < self.min_length", "if keys <= self.min_length", FIT_TESTS,
    ),
    # masks
    Mutant(
        "the last rows are as sparse as others",
        REFERENCE, "last = config.dense_from(shape.q_len)", "last = shape.q_len",
        ("tests/attention/test_last_rows.py", "-k", "reference"),
    ),
    Mutant(
        "a row of the window sees the key after its own",
        REFERENCE, "device=k.device) > last_key[..., None]", "device=k.device) > last_key[..., None] + 1",
        REFERENCE_TESTS,
    ),
    Mutant(
        "the last segment's rows count only to the end of a whole one",
        REFERENCE, "end = min(begin + segment, len(q))\n        if",
        "end = min(begin + segment, len(q) - 1)\n        if", REFERENCE_TESTS,
    ),
    Mutant(
        "a sliding window holds one key too many",
        WINDOWED, "(key > position - window)", "(key >= position - window)", WINDOWED_TESTS,
    ),
    Mutant(
        "the first row of a block loses the oldest key of its window",
        WINDOWED, "shape.offset + begin - window + 1)", "shape.offset + begin - window + 2)", WINDOWED_TESTS,
    ),
    Mutant(
        "the first key behind the padding is hidden",
        WINDOWED, "(key >= kv_start[:, None, None])", "(key > kv_start[:, None, None])", WINDOWED_TESTS,
    ),
    Mutant(
        "a prompt one token longer than a window hides nothing",
        HF, "int(q_offset) + q_length <= int(local)", "int(q_offset) + q_length <= int(local) + 1",
        ("tests/attention/test_windowed.py", "-k", "just_fits"),
    ),
    Mutant(
        "a mask with holes passes for padding",
        HF, "regular = bool((kept.sum(1) == last - first + 1).all())", "regular = True", HF_TESTS,
    ),
    # who computes what in a server
    Mutant(
        "a server's last rows begin one row late",
        FIT, "self._last_rows[step] - left", "self._last_rows[step] - left - 1", FIT_TESTS,
    ),
    Mutant(
        "a piece of a request sees the keys behind it",
        "s2o_runtime/serving/pieces.py", "(request, keys - last, 0, last, False)", "(request, keys, 0, last, False)",
        BACKENDS_TESTS,
    ),
    Mutant(
        "a batch is left to the stock backend while a layer waits for its self-test",
        FIT, "if self._tested or max_k < TEST_KEYS else None", "if self.layers else None", BACKENDS_TESTS,
    ),
    Mutant(
        "a preempted request's prompt ends where it first did",
        "s2o_runtime/vllm/prompts.py", "len(running.all_token_ids[request])", "0",
        ("tests/serving/test_vllm_prompts.py",),
    ),
    Mutant(
        "every rank runs the first rank's heads",
        "s2o_runtime/serving/layer.py", "config.heads[self.heads.start : self.heads.stop]",
        "config.heads[: len(self.heads)]", FIT_TESTS,
    ),
    Mutant(
        "a decoder layer's number is its row in the profile",
        FIT, "row = self.profile.geometry.row_of(number)",
        "row = number if number in range(len(self.layers)) else None", FIT_TESTS,
    ),
    Mutant(
        "ranks that share a KV head take them in turns",
        FIT, "head = self.index * kv_heads // self.size", "head = self.index % kv_heads", FIT_TESTS,
    ),
    Mutant(
        "a request with as many queries as a decode step has is no decode",
        FIT, "if queries <= self.decode_queries", "if queries < self.decode_queries", FIT_TESTS,
    ),
    Mutant(
        "a layer's matrices are no work", FIT, "attention + 2 * queries * self.row_weights", "attention", FIT_TESTS,
    ),
    Mutant(
        "a run may not be as large as its limit",
        PLAN, "total_k + keys > max_keys", "total_k + keys >= max_keys", PLAN_TESTS,
    ),
    Mutant(
        "the keys of a run are those of its last request",
        PLAN, "max(max_k, keys), total_k + keys", "max(max_k, keys), keys", PLAN_TESTS,
    ),
    Mutant(
        "requests of unlike lengths share a configuration",
        PLAN, "(own_step != step or", "((own_step is None) != (step is None) or", PLAN_TESTS,
    ),
    Mutant(
        "a request that only fills up a CUDA graph is given to S2O",
        PLAN, 'if queries > 0 else ""', 'if queries > 0 else None', PLAN_TESTS,
    ),
    Mutant(
        "rows of a sparse run begin where the batch does",
        CALLS, "cu_q=cu_q,", "cu_q=cu_q + run.begin,", BATCH_TESTS,
    ),
    Mutant(
        "chunks behind a prefix are taken for whole prompts",
        CALLS, "if run.total_k == run.end - run.begin", "if True", BATCH_TESTS,
    ),
    Mutant(
        "a length on the edge gets the bound of the next step",
        "s2o_runtime/lengths.py", "return -(-length // step) * step", "return (length // step + 1) * step", PLAN_TESTS,
    ),
    Mutant(
        "a shared bound is below the length",
        "s2o_runtime/lengths.py", "return -(-length // step) * step", "return length // step * step", PLAN_TESTS,
    ),
    Mutant(
        "steps of shared bounds are half as fine",
        "s2o_runtime/lengths.py", "(1 << length.bit_length() >> 1)", "(1 << length.bit_length())", PLAN_TESTS,
    ),
    Mutant(
        "shared bounds reach beyond the block table",
        CALLS, "min(max(shared_bound(max_k), q_bound + behind), room)", "max(shared_bound(max_k), q_bound + behind)",
        PLAN_TESTS,
    ),
    Mutant(
        "bounds that are shared hide that there is a prefix",
        CALLS, "behind = int(max_k > max_q)", "behind = 0", PLAN_TESTS,
    ),
    Mutant(
        "a plan is replayed into the queries that it reads",
        "s2o_runtime/attention/compute.py", "return laid and out.", "return laid or out.",
        ("tests/kernels/test_plan.py", "-k", "kernels_cannot_write"),
    ),
    Mutant(
        "another cache group reads this group's pages",
        BATCH, "other._calls, other._parts = {}, {}", "other._calls, other._parts = self._calls, self._parts",
        BATCH_TESTS,
    ),
    # prompts
    Mutant(
        "a group of many documents takes the place of other groups to certify on",
        "calibrate/prompts/prompts.py", "len(tallies[CERTIFY].groups)", "tallies[CERTIFY].by_domain.total()",
        ("tests/prompts/test_prompts.py",),
    ),
)  # fmt: skip


def run_tests(folder: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run pytest in a copy, up to the first failure.

    Returns:
        Its exit code, or -1 if it took too long, and the line of its output that names the failed test.
    """
    environment = os.environ | {"PYTHONPATH": _with_front(folder), "OMP_NUM_THREADS": "1"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # or a mutant of the same size and second would not be seen
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    try:
        outcome = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end after {SECONDS} s"
    failed = [line for line in outcome.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return outcome.returncode, failed[0] if failed else outcome.stdout.strip().rpartition("\n")[2]


def _with_front(folder: Path) -> str:
    """PYTHONPATH with the copy in front of whatever was there; without the tree that was copied."""
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join([str(folder), *(path for path in paths if Path(path).resolve() != ROOT)])


def copy_of_the_sources(folder: Path) -> None:
    """What the tests need, in a folder of its own."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder)


def killer(failed: str) -> str:
    """`FAILED tests/test_a.py::test_b[c] - AssertionError: ..` -> `test_b`, as pytest's last lines have it."""
    return failed.partition(" - ")[0].removeprefix("FAILED ").rpartition("::")[2].partition("[")[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Apply the mutants, print a line for each, and return 1 if one survives."""
    parser = argparse.ArgumentParser(
        "scripts.mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants whose name or file contains this")
    parser.add_argument("--list", action="store_true", help="print their names and files")
    args = parser.parse_args(argv)
    mutants = [mutant for mutant in MUTANTS if args.only in mutant.name or args.only in mutant.path]
    if args.list or not mutants:
        print("\n".join(f"{mutant.path}: {mutant.name}" for mutant in mutants) or f"no mutant with {args.only!r}")
        return 0 if mutants else 2
    with tempfile.TemporaryDirectory(prefix="s2o-mutants-") as temporary:
        folder = Path(temporary)
        copy_of_the_sources(folder)
        for tests in dict.fromkeys(mutant.tests for mutant in mutants):
            code, said = run_tests(folder, tests)
            if code != 0:
                print(f"without a mutant {' '.join(tests)} does not pass: {said}")
                return 2
        survivors = [mutant.name for mutant in mutants if not _is_killed(folder, mutant)]
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants killed")
    return 1 if survivors else 0


def _is_killed(folder: Path, mutant: Mutant) -> bool:
    """Apply one mutant to the copy, run its tests, print a line and put the file back."""
    path = folder / mutant.path
    original = path.read_text(encoding="utf-8")
    path.write_text(mutant.applied(original), encoding="utf-8")
    begun = time.monotonic()
    code, said = run_tests(folder, mutant.tests)
    path.write_text(original, encoding="utf-8")
    killed = code == FAILED and said.startswith("FAILED ")
    verdict = f"killed by {killer(said)}" if killed else f"SURVIVES ({said})"
    print(f"{mutant.path}: {mutant.name}: {verdict}, {time.monotonic() - begun:.0f} s", flush=True)
    return killed


if __name__ == "__main__":
    sys.exit(main())
