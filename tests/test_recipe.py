"""What a recipe allows, what it says about itself, and its way through YAML."""

import dataclasses
import json
from pathlib import Path

import pytest

from calibrate.recipe import DEFAULT_BUDGET, NULLABLE, OPTIONS, Budget, Recipe, load_yaml, merged, seconds
from s2o_runtime.errors import ConfigError

BASE = {"model": "demo", "lengths": (1024, 2048), "out": Path("profiles/p.safetensors")}
# every option with a value that is not its default
ALL = BASE | {
    "budget_mse": 1e-5,
    "budget_scope": "model",
    "check_lengths": (1100, 4096),
    "prompts": Path("mine.jsonl"),
    "num_prompts": 3,
    "held_out": 1,
    "trials": 5,
    "time_limit": 90.5,
    "margin": 0.5,
    "worst_rows": None,
    "needles": 0.9,
    "representatives": (8,),
    "grains": (1, 2),
    "segments": (64, 320),
    "tails": (True,),
    "seed": 7,
    "device": "cuda:1",
    "random_weights": True,
    "allow_regression": True,
    "journal": Path("kept.jsonl"),
    "method": "auto",
}


def recipe(**options):
    return Recipe.of(BASE | options)


def written(folder, text):
    path = folder / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_every_option_but_the_other_budget_is_in_the_example():
    assert set(ALL) == set(OPTIONS) - {"budget_rel_mse"}
    default = Recipe.of(BASE)
    made = Recipe.of(ALL)
    differ = {field.name for field in dataclasses.fields(Recipe)} - {"model", "lengths", "out"}
    assert all(getattr(made, name) != getattr(default, name) for name in differ)
    assert default.budget == DEFAULT_BUDGET


@pytest.mark.parametrize("options", [BASE, ALL, BASE | {"budget_rel_mse": 0.5, "check_lengths": ()}])
def test_a_recipe_survives_yaml(options, tmp_path):
    made = Recipe.of(options)
    options_again = load_yaml(written(tmp_path, made.to_yaml()))
    assert set(options_again) == set(OPTIONS) - {"budget_mse" if made.budget.kind == "rel_mse" else "budget_rel_mse"}
    assert Recipe.of(options_again) == made
    assert Recipe.of(options_again).to_yaml() == made.to_yaml()


def test_yaml_as_people_write_it(tmp_path):
    text = "model: demo\nbudget_mse: 1e-4  # a text to YAML\nlengths: [2048, 1024, 2048]\ntails: [on, off]\n"
    text += "time_limit: 1.5h\nmargin: 1\nout: ~/p.safetensors\n"
    expected = {"model": "demo", "budget_mse": 1e-4, "lengths": (1024, 2048), "tails": (False, True)}
    expected |= {"time_limit": 5400.0, "margin": 1.0, "out": Path("~/p.safetensors")}
    assert load_yaml(written(tmp_path, text)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trial: 3", "has 'trial', which is no option: did you mean trials?"),
        ("budget: 3", "has 'budget', which is no option: did you mean budget_"),
        ("num-prompts: 3", "has 'num-prompts', which is no option: did you mean num_prompts?"),
        ("1: 2", "has 1, which is no option"),
        ("trials: many", "trials is 'many': expected an integer"),
        ("trials: 1.5", "trials is 1.5: expected an integer"),
        ("trials: true", "trials is True: expected an integer"),
        ("trials:", "trials is None: expected an integer"),
        ("margin: [1]", r"margin is \[1\]: expected a number"),
        ("margin: yes", "margin is True: expected a number"),
        ("budget_mse: little", "budget_mse is 'little': expected a number"),
        (f"budget_mse: 1{'0' * 400}", "budget_mse is 10+.*: expected a number"),
        ("lengths: 1024", "lengths is 1024: expected a list of integers"),
        ("lengths: 1024,2048", "lengths is '1024,2048': expected a list of integers"),
        ("lengths: {1024: 1}", "lengths is {1024: 1}: expected a list of integers"),
        ("lengths: [1k]", r"lengths is \['1k'\]: expected a list of integers"),
        ("tails: [maybe]", r"tails is \['maybe'\]: expected a list of true and false"),
        ("time_limit: 5 days", "time_limit is '5 days': expected seconds, or a duration such as 5m"),
        ("random_weights: 1", "random_weights is 1: expected true or false"),
        ("model: 7", "model is 7: expected a name"),
        ("out: [a]", r"out is \['a'\]: expected a file name"),
        ("", "holds a NoneType: expected lines such as trials: 16"),
        ("- model", "holds a list: expected lines"),
        ("model: [", "is not YAML"),
        ("model: !!python/object/apply:os.getcwd []", "is not YAML .*could not determine a constructor"),
        ("out: 2024-13-45", "is not YAML"),
        (b"\xff\xfe\x00", "is not YAML"),
        ("[" * 5000, "is not YAML"),
        ("# " + "x" * 70_000, "is larger than 65536 bytes"),
        # a billion laughs, which must not be printed either
        ("lengths: [&a [1, 1], &b [*a, *a, *a, *a, *a, *a, *a, *a, *a], "
         + ", ".join(f"&c{i} [{', '.join([f'*c{i - 1}' if i else '*b'] * 9)}]" for i in range(12)) + "]",
         "lengths is .*: expected a list of integers"),
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_a_bad_recipe_file_is_one_sentence(text, message, tmp_path):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as found:
        load_yaml(path)
    assert str(found.value).startswith(f"recipe {path}")
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 500


def test_a_recipe_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"none.yaml cannot be read \(No such file or directory\): check the path"):
        load_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_yaml(tmp_path)


def test_what_may_be_null_in_a_file(tmp_path):
    for name in OPTIONS:
        path = written(tmp_path, f"{name}: null")
        if name in NULLABLE:
            assert load_yaml(path) == {name: None}
            recipe(**{name: None})
        else:
            with pytest.raises(ConfigError, match=f"{name} is None: expected"):
                load_yaml(path)


def test_flags_override_a_file():
    file = {"model": "demo", "trials": 3, "budget_mse": 1.0, "seed": 2}
    assert merged(file, {"trials": 9}) == file | {"trials": 9}
    assert merged(file, {"budget_rel_mse": 0.1}) == {"model": "demo", "trials": 3, "seed": 2, "budget_rel_mse": 0.1}
    assert merged(file, {}) == file


def test_two_budgets_are_refused():
    with pytest.raises(ConfigError, match="budget_mse and budget_rel_mse are both given: choose one"):
        recipe(budget_mse=1.0, budget_rel_mse=1.0)
    assert Budget.of({"budget_mse": 2.0}) == Budget("mse", 2.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": ()}, r"lengths \(\) are empty"),
        ({"lengths": (2048, 1024)}, "are empty, repeated or not ascending"),
        ({"lengths": (1024, 1024)}, "are empty, repeated or not ascending"),
        ({"lengths": (100, 1024)}, "length 100 is shorter than one segment of 256"),
        ({"segments": (512,), "lengths": (500,)}, "length 500 is shorter than one segment of 512"),
        ({"segments": ()}, r"segments \(\) are empty"),
        ({"segments": (100, 256)}, "segments 100 is not supported: use multiples of 64 from 64 to 65536"),
        ({"segments": (0, 256)}, "segments 0 is not supported"),
        ({"segments": (256, 131072)}, "segments 131072 is not supported"),
        ({"tails": ()}, r"tails \(\) are empty"),
        ({"tails": (True, False)}, "not ascending"),
        ({"representatives": (3,)}, "representatives 3 is not supported"),
        ({"grains": (3,)}, "grains 3 is not supported"),
        ({"check_lengths": (1536, 1200)}, "not ascending"),
        ({"check_lengths": (1024,)}, "check length 1024 is calibrated"),
        ({"check_lengths": (512, 1536)}, "check length 512 is below 1024, the shortest that is calibrated"),
        ({"budget_scope": "head"}, "budget_scope 'head' is not known: use layer or model"),
        ({"budget_mse": 0.0}, r"budget 0\.0 is not a positive number"),
        ({"time_limit": 0.0}, r"time_limit is 0\.0: use a number of seconds above 0"),
        ({"time_limit": float("inf")}, "time_limit is inf"),
        ({"worst_rows": -0.1}, r"worst_rows is -0\.1: use a number above 0, or 0 for off"),
        ({"worst_rows": float("nan")}, "worst_rows is nan"),
        ({"needles": 1.1}, r"needles is 1\.1: use a share from 0 to 1"),
        ({"lengths": (4096, 4200)}, "lengths 4096 and 4200 are less than an eighth of an octave apart"),
        ({"margin": 0.0}, r"margin is 0\.0"),
        ({"held_out": 0}, "held_out is 0: use at least 1"),
        ({"journal": BASE["out"]}, "cannot be both the journal and the profile"),
    ],
)
def test_what_a_recipe_refuses(options, message):
    with pytest.raises(ConfigError, match=message):
        recipe(**options)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((1024,), ()),
        ((1024, 2048), (1536,)),  # 1448.2
        ((8192, 32768), (16384,)),
        ((512, 8192, 131072), (2048, 32768)),
        ((512, 600), ()),  # 554.3 is nearest to 512, which is calibrated
        ((600, 700), ()),  # 648.1 is nearest to 768, which is not between them
    ],
)
def test_a_length_between_two_neighbours_is_checked(lengths, expected):
    assert recipe(lengths=lengths).checked_lengths == expected
    assert recipe(lengths=lengths, check_lengths=()).checked_lengths == ()
    assert recipe(lengths=lengths, check_lengths=(5000 * 256,)).checked_lengths == (5000 * 256,)


def test_the_models_limit_holds_for_check_lengths_too():
    recipe(lengths=(1024,)).check_limit(1024)
    recipe(check_lengths=(4096,)).check_limit(4096)
    for made, longest in ((recipe(check_lengths=(4096,)), 4096), (recipe(), 2048)):
        with pytest.raises(ConfigError, match=f"length {longest} is beyond the model's limit of {longest - 1}"):
            made.check_limit(longest - 1)


def test_half_of_a_prompt_lies_in_some_prefix():
    assert recipe().segments_for(1024) == (256, 512)
    assert recipe().segments_for(1 << 20) == (256, 512, 1024, 2048)
    assert recipe().segments_for(300) == (256,)  # the shortest is always there
    assert recipe(segments=(64, 192)).segments_for(256) == (64,)


def test_the_journal_is_named_by_the_model_alone():
    assert recipe(model="org/Some_Model").journal_path == Path("profiles/org-some-model.journal.jsonl")
    assert recipe(budget_mse=1.0).journal_path == recipe(budget_rel_mse=0.1).journal_path
    assert recipe(journal=Path("mine")).journal_path == Path("mine")


def test_the_record_holds_what_decides_the_result():
    record = recipe(journal=Path("elsewhere"), prompts=Path("folder/mine.jsonl")).record()
    fields = {field.name for field in dataclasses.fields(Recipe)}
    assert set(record) == fields - {"out", "journal"}
    assert record["check_lengths"] == [1536]
    assert record["prompts"] == "mine.jsonl"
    assert record["budget"] == {"kind": "rel_mse", "value": 1e-3}
    assert json.loads(json.dumps(record)) == record


@pytest.mark.parametrize(("text", "value"), [("90", 90), ("90s", 90), (" 5m", 300), ("1.5h", 5400), ("0", 0)])
def test_durations(text, value):
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "m", "-5", "5d", "1h30m", "nan", "1e3", "5 m", "s5"])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="is not a duration"):
        seconds(text)
