"""RULER's tasks whose generators need no network, as lm-evaluation-harness makes and scores them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from torch import Tensor

from calibrate.evaluation.plan import RULER
from calibrate.prompts.retrieval import encode, get_start_tokens
from s2o_runtime.errors import InputError, ResourceError

PACKAGE = "lm_eval.tasks.ruler"
INSTALL = "pip install --no-deps lm_eval==0.4.13 wonderwords==3.0.1"
SHORTEST = 2048  # tokens: in less, common words find no room, and lm_eval's generators do not end
EXAMPLE, ROOM = 5, 470  # lines of noise in the smallest example of variable tracking, and the tokens that it may have


@dataclass(frozen=True)
class RulerTask:
    """One task: the lm_eval file and function that make it, and from its yaml the tokens of an answer."""

    module: str
    function: str
    most: int
    delimiter: str = " "  # between the text and the beginning of the answer
    numbered: bool = False  # the answers are a list with numbers


TASKS = {
    "niah_single_1": RulerTask("niah_utils", "niah_single_1", 128),
    "niah_multikey_2": RulerTask("niah_utils", "niah_multikey_2", 128),
    "niah_multikey_3": RulerTask("niah_utils", "niah_multikey_3", 128),
    "ruler_vt": RulerTask("vt_utils", "get_vt_dataset", 30),
    "ruler_cwe": RulerTask("cwe_utils", "get_cw_dataset", 120, "\n\n", numbered=True),
    "ruler_fwe": RulerTask("fwe_utils", "fwe_download", 50),
}


@dataclass(frozen=True)
class RulerQuestion:
    """One prompt of a task.

    ids: [L], int64. answer: the token ids of the right answer. most: tokens that a model may write. score: lm_eval's
    metric of what it wrote, from 0 to 1.
    """

    ids: Tensor
    answer: list[int]
    most: int
    score: Callable[[str], float]


def make_question(tokenizer: Any, name: str, length: int, sample: int, *, count: int, seed: int) -> RulerQuestion:
    """Make prompt number `sample` of `count` of a task, of at most `length` tokens.

    Raises ResourceError if lm_eval or wonderwords is not installed, InputError if a length is too short for the task.
    """
    task, row = TASKS[name], _draw_rows(tokenizer, name, length, count, seed)[sample]
    start = get_start_tokens(tokenizer)
    ids = start + encode(tokenizer, f"{row['input']}{task.delimiter}{row['gen_prefix']}")
    answers = [f"{number}. {word}" if task.numbered else word for number, word in enumerate(row["outputs"], start=1)]
    process = load_generators()["common_utils"].process_results
    return RulerQuestion(
        torch.tensor(ids),
        encode(tokenizer, f" {' '.join(answers)}"),
        task.most,
        lambda text: float(process(row, [text])[str(length)]),
    )


@lru_cache(maxsize=len(TASKS))  # the prompts of one length
def _draw_rows(tokenizer: Any, name: str, length: int, count: int, seed: int) -> list[dict[str, Any]]:
    """Return the first `count` rows of a task, as lm_eval makes them; more of them begin with the same."""
    if length < SHORTEST:
        raise InputError(f"length {length} is too short for the task {RULER!r}: use {SHORTEST} tokens or more")
    modules, task = load_generators(), TASKS[name]
    # transformers would warn of texts that are longer than the model's prompts
    encoder = partial(tokenizer, verbose=False, return_attention_mask=False)
    random.seed(f"{seed}/{name}/{length}")  # the generators take Python's and numpy's global random numbers
    np.random.seed(random.getrandbits(32))
    modules["cwe_utils"].RNG.seed(random.getrandbits(32))
    with contextlib.redirect_stdout(io.StringIO()):
        example, _ = modules["vt_utils"].generate_input_output(EXAMPLE, 1, 4, is_icl=True)
        if (tokens := len(encoder(example).input_ids)) > ROOM:  # lm_eval would look for a shorter one for ever
            raise InputError(
                f"the tokenizer makes {tokens} tokens of RULER's example, expected {ROOM} at most: leave {RULER!r} out"
            )
        modules[task.module].tqdm = lambda samples, **_: samples[:count]  # of the 500 that lm_eval always makes
        modules["prepare_niah"].tqdm = modules[task.module].tqdm
        make = getattr(modules[task.module], task.function)
        rows: list[dict[str, Any]] = make(tokenizer=encoder, max_seq_lengths=[length])["test"]
    if len(rows) < count or not all(row["outputs"] for row in rows):
        raise InputError(f"length {length} is too short for RULER's task {name!r}: use 4096 tokens or more")
    return rows


@cache
def load_generators() -> dict[str, Any]:
    """Import lm_eval's files of RULER alone.

    The package itself would import its evaluator, datasets and nltk, hundreds of megabytes that these tasks do not use,
    and try to download a part of nltk. Raises ResourceError if lm_eval or wonderwords is not installed.
    """
    found = importlib.util.find_spec("lm_eval")
    if found is None or importlib.util.find_spec("wonderwords") is None:
        raise ResourceError(f"the task {RULER!r} needs lm_eval and wonderwords, found at most one of them: {INSTALL}")
    package: Any = ModuleType(PACKAGE)
    package.__path__ = [str(Path(*found.submodule_search_locations or ()) / "tasks" / "ruler")]
    data_set = SimpleNamespace(from_list=lambda rows, split: rows)
    stand_ins = {
        PACKAGE: package,
        "datasets": SimpleNamespace(Dataset=data_set, Split=SimpleNamespace(TEST="test")),
        "nltk": SimpleNamespace(sent_tokenize=None, data=SimpleNamespace(find=str)),
    }
    _ = transformers.AutoTokenizer  # loaded now: it looks for datasets
    hidden = {name: module for name, module in sys.modules.items() if name.startswith(tuple(stand_ins))}
    for name in hidden:
        del sys.modules[name]
    sys.modules.update(stand_ins)
    try:
        common: Any = importlib.import_module(f"{PACKAGE}.common_utils")
        common.resolve_tokenizer_name = lambda options: options["tokenizer"]
        common.get_tokenizer = lambda tokenizer: tokenizer  # it would load one by its name
        with patch("importlib.metadata.version", lambda name: "3.9.1"):  # the oldest nltk that is accepted
            names = ("common_utils", "prepare_niah", *dict.fromkeys(task.module for task in TASKS.values()))
            return {name: importlib.import_module(f"{PACKAGE}.{name}") for name in names}
    finally:
        for name in [name for name in sys.modules if name.startswith(tuple(stand_ins))]:
            del sys.modules[name]
        sys.modules.update(hidden)
