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
import shlex
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


# by file and what pytest is called with: what goes wrong, what is replaced, by what
MISTAKES: tuple[tuple[str, str, tuple[tuple[str, str, str], ...]], ...] = (
    # the allocation of a budget over heads
    ("calibrate/search/allocate.py", "tests/search/test_allocate.py", (
        ("a step that costs exactly what is left is refused", "price <= left", "price < left"),
        ("the budget is not multiplied by the layers that share it", "budget * len(layers)", "budget"),
        ("one head may spend all of its layer's budget",
         "if point.mse * weight <= cap", "if point.mse * weight <= budget"),
        ("the hull of a head's points is the upper one",
         "<= _compute_slope(hull[-2], point)", ">= _compute_slope(hull[-2], point)"),
        ("a head takes a later step of its hull without the earlier one", "blocked.add(head)  #", "pass  #"),
        ("what a head already spent is paid again for a point between corners",
         "(point.mse - chosen[head].mse) * weights[head] <= left", "point.mse * weights[head] <= left"),
        ("the guard on rows refuses a head that is exactly at it", "  if row <= limit and", "  if row < limit and"),
    )),
    # the bounds of the certificate
    ("calibrate/proof/bounds.py", "tests/proof/test_bounds.py", (
        ("one text more than the binomial test admits may be above a limit",
         "betaincinv(count - above, above + 1, risk)", "betaincinv(count - above + 1, above, risk)"),
        ("every length has the whole risk of the means", "(layers * len(recipe.all_lengths))", "layers"),
        ("every layer has the whole risk of the means", "layers * len(recipe.all_lengths)", "len(recipe.all_lengths)"),
        ("kinds with few texts have each its own variance", "[max(variance, squares / degrees * m**2)", "[variance"),
        ("the upper bound is for the median instead of the mean",
         "means, variances = [statistics.fmean(group)", "means, variances = [statistics.median(group)"),
        ("the lower bound is an upper one", "max(0.0, mean - _quantile(", "max(0.0, mean + _quantile("),
        ("what differs between kinds of text widens a bound",
         "variances = [statistics.fmean(group) for group in groups], [statistics.variance(group)",
         "variances = [statistics.fmean(group) for group in groups], [statistics.variance(values)"),
        ("a two-sided interval has the whole risk on each side",
         "tail = (1 - confidence) / 2", "tail = 1 - confidence"),
        ("the first look spends the whole risk, and the others theirs on top",
         "part = 0.5 if fraction == SPEND_FRACTIONS[0]", "part = 1.0 if fraction == SPEND_FRACTIONS[0]"),
        ("each later look spends the risk that they share", "0.5 / (len(SPEND_FRACTIONS) - 1)", "0.5"),
    )),
    ("calibrate/proof/certify.py", "tests/proof/test_certify.py", (
        ("a step is hopeless as soon as the first bound expects it over the limit",
         "self._first_bound > HOPELESS * limit", "self._first_bound > limit"),
        ("the last step is passed over too", "not is_hopeless or step == len(SPEND_FRACTIONS) - 1", "not is_hopeless"),
        ("prompts go on with the reduced layer", "return None if is_first else self.candidate", "return None"),
        ("a prompt of a known group counts by itself", "(prompt.domain, prompt.group or number)", "number"),
    )),
    # what the answers' certificate and their budget rest on
    ("calibrate/proof/certify_answers.py", "tests/proof/test_certify_answers.py", (
        ("the worst eighth of the prompts may be anything", "find_worst_eighth(answers)", "0.0"),
    )),
    ("calibrate/proof/weigh.py", "tests/proof/test_weigh.py", (
        ("what is predicted of answers is taken for measured", "allocate(spent), powers", "allocate(budget), powers"),
        ("single rows are guarded in no layer", "if cost >= KNEE * mean_cost", "if cost < 0.0"),
    )),
    ("calibrate/prompts/prompts.py", "tests/prompts/test_prompts.py", (
        ("a group of documents is split between the sets", "free.remove(name)", "pass"),
    )),
    # what a layer may spend
    ("calibrate/proof/adjust.py", "tests/proof/test_adjust.py", (
        ("a layer is given its whole limit, without the margin",
         "times = recipe.margin * limit / largest", "times = limit / largest"),
        ("a layer is given what brings its bound to the limit itself",
         "TARGET_SHARE_OF_LIMIT * limit / max(bound,", "limit / max(bound,"),
        ("the bound that is expected is not looked at", "if texts >= MIN_TEXTS_FOR_BOUND:", "if texts < 0:"),
        ("the bounds of a few certify prompts decide",
         "if texts >= MIN_TEXTS_FOR_BOUND:", "if texts > 0:"),
        ("a change may be as large as the curves say", "min(times, MAX_STEP)", "times"),
        ("rows at the guard exactly are off too far",
         "if proof.worst > (recipe.worst_rows", "if proof.worst >= (recipe.worst_rows"),
        ("rows that are off too far let a layer be given more",
         "1 / NO_CHANGE_WITHIN**2 if candidate.adjusted[key] else 1.0", "times"),
        ("a layer's spending is changed once more than it may",
         "candidate.adjusted[key] == MAX_ADJUSTMENTS", "candidate.adjusted[key] > MAX_ADJUSTMENTS"),
        ("a layer that was tightened is given more again", " or key in candidate.tightened", ""),
    )),
    # profiles
    ("s2o_runtime/files.py", "tests/profile/test_profile.py", (
        ("a file is written in place instead of renamed",
         "os.replace(temporary, path)", "path.write_bytes(data)\n        os.unlink(temporary)"),
    )),
    ("s2o_runtime/profile/file.py", "tests/profile/test_profile.py", (
        ("the digest leaves the tensors out", "digest.update(read_tensor_bytes(tensor))", "pass"),
    )),
    ("s2o_runtime/lengths.py", "tests/profile/test_profile.py", (
        ("of two buckets equally near the shorter decides",
         "length * length >= shorter * longer", "length * length > shorter * longer"),
    )),
    ("s2o_runtime/serving/fit.py", "tests/serving/test_vllm_fit.py", (
        ("the shortest calibrated length itself is too short",
         "if length < self.min_length", "if length <= self.min_length"),
    )),
    # masks
    ("s2o_runtime/reference/attention.py", "tests/ops/test_reference.py -k naive_loops", (
        ("the last rows are as sparse as others",
         "last = config.find_first_dense_row(shape.q_len)", "last = shape.q_len"),
    )),
    ("s2o_runtime/reference/attention.py", "tests/ops/test_reference.py", (
        ("a row of the window sees the key after its own",
         "device=k.device) > last_key[..., None]", "device=k.device) > last_key[..., None] + 1"),
        ("the last segment's rows count only to the end of a whole one",
         "end = min(begin + segment, len(q))\n        if", "end = min(begin + segment, len(q) - 1)\n        if"),
    )),
    ("s2o_runtime/attention/compute.py", "tests/ops/test_reference.py -k windows", (
        ("a sliding window holds one key too many", "(key > position - window)", "(key >= position - window)"),
        ("the first row of a block loses the oldest key of its window",
         "shape.offset + begin - window + 1)", "shape.offset + begin - window + 2)"),
        ("the first key behind the padding is hidden",
         "(key >= kv_start[:, None, None])", "(key > kv_start[:, None, None])"),
    )),
    ("s2o_runtime/huggingface/hf.py", "tests/ops/test_windowed.py -k just_fits", (
        ("a prompt one token longer than a window hides nothing",
         "int(q_offset) + q_length <= int(local)", "int(q_offset) + q_length <= int(local) + 1"),
    )),
    ("s2o_runtime/huggingface/hf.py", "tests/huggingface/test_hf.py -m 'not slow and not exhaustive'", (
        ("a mask with holes passes for padding",
         "regular = bool((kept.sum(1) == last - first + 1).all())", "regular = True"),
    )),
    # who computes what in a server
    ("s2o_runtime/serving/fit.py", "tests/serving/test_vllm_fit.py", (
        ("a server's last rows begin one row late", "request.length)] - left", "request.length)] - left - 1"),
    )),
    ("s2o_runtime/serving/batch.py", "tests/serving/test_batches.py", (
        ("a request without its last rows sees their keys",
         "Request(first, keys - last, reason,", "Request(first, keys, reason,"),
    )),
    ("s2o_runtime/serving/fit.py", "tests/serving/test_batches.py", (
        ("the last row of a prompt is one that nothing reads", "return self.left > 0 and", "return self.left >= 0 and"),
        ("a chunk runs the settings of its keys so far",
         "return self.keys + self.left", "return self.keys"),
        ("a batch is left to the stock backend while a layer waits for its self-test",
         "if self._all_tested or largest.keys < TEST_KEYS else None", "if self.layers else None"),
    )),
    ("s2o_runtime/vllm/engine.py", "tests/serving/test_vllm_prompts.py", (
        ("a preempted request's prompt ends where it first did", "len(running.all_token_ids[request])", "0"),
    )),
    ("s2o_runtime/serving/fit.py", "tests/serving/test_vllm_fit.py", (
        ("every rank runs the first rank's heads",
         "config.heads[self.heads.start : self.heads.stop]", "config.heads[: len(self.heads)]"),
    )),
    ("s2o_runtime/serving/fit.py", "tests/serving/test_vllm_fit.py", (
        ("a decoder layer's number is its row in the profile",
         "row = self.profile.geometry.find_row(number)", "row = number if number in range(len(self.layers)) else None"),
        ("ranks that share a KV head take them in turns",
         "else self.index * kv_heads // self.size", "else self.index % kv_heads"),
        ("a request with as many queries as a decode step has is no decode",
         "if request.queries <= self.decode_queries", "if request.queries < self.decode_queries"),
        ("a layer's matrices are no work", "attention + 2 * request.queries * self.row_weights <", "attention <"),
    )),
    ("s2o_runtime/serving/batch.py", "tests/serving/test_batches.py -k planned", (
        ("a slice may not be as large as its limit", "request.keys > max_keys", "request.keys >= max_keys"),
        ("the keys of a slice are those of its last request",
         "max(max_k, request.keys), total_k + request.keys", "max(max_k, request.keys), request.keys"),
        ("requests of unlike lengths share a configuration",
         "(own_bucket != bucket or", "((own_bucket is None) != (bucket is None) or"),
        ("a request that only fills up a CUDA graph is given to S2O",
         "if request.queries > 0 else \"\"", "if request.queries > 0 else None"),
    )),
    ("s2o_runtime/serving/batch.py", "tests/serving/test_vllm_backend.py", (
        ("rows of a sparse slice begin where the batch does", "edges - span.begin", "edges.clone()"),
        ("chunks behind a prefix are taken for whole prompts", "if span.total_k == span.end - span.begin", "if True"),
    )),
    ("s2o_runtime/lengths.py", "tests/serving/test_batches.py -k bounds", (
        ("a length on the edge gets the bound of the next step",
         "return -(-length // step) * step", "return (length // step + 1) * step"),
        ("a shared bound is below the length", "return -(-length // step) * step", "return length // step * step"),
        ("steps of shared bounds are half as fine", "(1 << length.bit_length() >> 1)", "(1 << length.bit_length())"),
    )),
    ("s2o_runtime/serving/batch.py", "tests/serving/test_batches.py -k bounds", (
        ("shared bounds reach beyond the block table",
         "min(max(round_up_length(max_k), q_bound + behind), room)", "max(round_up_length(max_k), q_bound + behind)"),
        ("bounds that are shared hide that there is a prefix", "behind = int(max_k > max_q)", "behind = 0"),
    )),
    ("s2o_runtime/attention/compute.py", "tests/ops/test_plan.py -k kernels_cannot_write", (
        ("a plan is replayed into the queries that it reads", "return laid and out.", "return laid or out."),
    )),
    ("s2o_runtime/vllm/backend.py", "tests/serving/test_vllm_backend.py", (
        ("another cache group reads this group's pages",
         "other._calls, other._parts = {}, {}", "other._calls, other._parts = self._calls, self._parts"),
    )),
    # prompts
    ("calibrate/prompts/prompts.py", "tests/prompts/test_prompts.py", (
        ("a group of many documents takes the place of other groups to certify on",
         "len(tallies[CERTIFY].groups)", "tallies[CERTIFY].by_domain.total()"),
    )),
)  # fmt: skip
MUTANTS = tuple(
    Mutant(name, path, before, after, tuple(shlex.split(tests)))
    for path, tests, mistakes in MISTAKES
    for name, before, after in mistakes
)


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
    """Return what the tests need, in a folder of its own."""
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
