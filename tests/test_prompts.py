import json
from pathlib import Path

import pytest

from calibrate.model.models import DEMO_FOLDER
from calibrate.prompts.prompts import load_prompts, read_jsonl
from calibrate.recipe import Budget, Recipe
from s2o_runtime.errors import InputError


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO_FOLDER)


def recipe(**changes):
    settings = {"lengths": (512, 1024), "num_prompts": 2, "held_out": 2, **changes}
    return Recipe("demo", Budget("mse", 1e-4), out=Path("unused"), **settings).validate()


def write(path, entries):
    path.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries))
    return path


def test_built_in_prompts_are_exact_distinct_and_reproducible(tokenizer):
    made = load_prompts(recipe(), tokenizer)
    for length in (512, 1024):
        prompts = made.calibration[length] + made.held_out[length]
        assert [prompt.length for prompt in prompts] == [length] * 4
        assert len({prompt.sha256 for prompt in prompts}) == 4
    assert made.record() == load_prompts(recipe(), tokenizer).record()
    assert made.record() != load_prompts(recipe(seed=1), tokenizer).record()


def test_no_document_is_calibrated_on_at_one_length_and_proven_on_at_another(tokenizer, tmp_path):
    made = load_prompts(recipe(lengths=(4096, 16384)), tokenizer)
    assert sorted(made.held_out) == [4096, 8192, 16384]  # one between them is only checked
    named = [
        {
            line
            for prompts in of_length.values()
            for prompt in prompts
            for line in tokenizer.decode(prompt.ids).splitlines()
            if line.startswith("# ") and line.endswith(".py")
        }
        for of_length in (made.calibration, made.held_out)
    ]
    assert all(len(files) > 8 for files in named)
    assert not named[0] & named[1]

    path = write(tmp_path / "p.jsonl", [{"text": f"document{index} " + "word " * 1200} for index in range(8)])
    made = load_prompts(recipe(prompts=path, lengths=(400, 600)), tokenizer)
    named = [
        {tokenizer.decode(prompt.ids).split()[0] for prompts in of_length.values() for prompt in prompts}
        for of_length in (made.calibration, made.held_out)
    ]
    assert [len(names) for names in named] == [2, 2]
    assert not named[0] & named[1]


def test_built_in_prompts_ask_for_their_needles(tokenizer):
    text = tokenizer.decode(load_prompts(recipe(lengths=(4096,)), tokenizer).held_out[4096][0].ids)
    asked = [line for line in text.splitlines() if line.startswith("# What is the secret code for")]
    assert len(asked) == 4
    for line in asked:
        word, code = line.split("?")[0].split()[-1], line.split()[-1]
        assert f"# The secret code for {word} is {code}" in text


def test_user_prompts_are_cut_in_the_middle_and_split(tokenizer, tmp_path):
    texts = [f"start{index} " + "word " * 2000 + f"end{index}" for index in range(4)]
    path = write(
        tmp_path / "p.jsonl",
        [{"text": texts[0]}, {"prompt": texts[1]}, texts[2], "", {"text": texts[3]}, {"text": "short"}],
    )
    with pytest.raises(InputError, match=r"p.jsonl:3: "):
        read_jsonl(path, tokenizer)  # bare text is not JSON
    path = write(
        tmp_path / "p.jsonl", [{"text": texts[0]}, {"prompt": texts[1]}, json.dumps(texts[2]), "", {"text": texts[3]}]
    )
    made = load_prompts(recipe(prompts=path, lengths=(600,)), tokenizer)
    found = set()
    for prompt in made.calibration[600] + made.held_out[600]:
        assert prompt.length == 600
        text = tokenizer.decode(prompt.ids)
        number = text[5]
        assert text.startswith(f"start{number} word")
        assert text.endswith(f"word end{number}")
        found.add(number)
    assert found == {"0", "1", "2", "3"}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (['{"text": "a"}', '{"text": '], "p.jsonl:2: "),
        (['{"body": "a"}'], 'p.jsonl:1: expected a string, or an object with "text"'),
        (["[1]"], "p.jsonl:1: expected a string"),
        ([""], "holds no prompts"),
    ],
)
def test_bad_lines_are_named(tokenizer, tmp_path, entries, message):
    with pytest.raises(InputError, match=message):
        read_jsonl(write(tmp_path / "p.jsonl", entries), tokenizer)


def test_unreadable_and_too_short_files(tokenizer, tmp_path):
    with pytest.raises(InputError, match=r"cannot be read \(No such file or directory\)"):
        read_jsonl(tmp_path / "none.jsonl", tokenizer)
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="it is not UTF-8 text"):
        read_jsonl(tmp_path / "binary.jsonl", tokenizer)
    path = write(tmp_path / "short.jsonl", [{"text": "word " * 100}] * 5)
    with pytest.raises(
        InputError, match=r"0 prompts to calibrate on of 512 tokens or more \(the longest has 101\): at least 1 must be"
    ):
        load_prompts(recipe(prompts=path), tokenizer)
