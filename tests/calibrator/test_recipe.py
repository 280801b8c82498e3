"""What a recipe allows, what it says about itself, and its way through YAML."""

import dataclasses
import json
from pathlib import Path

import pytest

from calibrate.recipe import (
    DEFAULT_BUDGET,
    DOMAINS,
    KINDS,
    OPTIONS,
    WORKERS,
    Budget,
    Recipe,
    check_limit,
    load_yaml,
    merged,
)
from s2o_runtime.errors import ConfigError

BASE = {"model": "demo", "lengths": (1024, 2048), "out": Path("profiles/p.safetensors")}
# every option with a value that is not its default, but prompts, which exclude domains
ALL = BASE | {
    "budget_mse": 1e-5,
    "ceiling_rel_mse": 2e-3,
    "budget_scope": "model",
    "check_lengths": (1100, 4096),
    "kv_cache_dtype": "fp8",
    "chunk": 4096,
    "domains": ("prose", "chinese"),
    "hide_needles": False,
    "num_prompts": 3,
    "num_held_out": 1,
    "num_certify": 7,
    "per_prompt": True,
    "trials": 5,
    "time_limit": 90.5,
    "margin": 0.5,
    "last_rows": 512,
    "worst_rows": None,
    "keep_needles": 0.9,
    "scores": ("input", "int8"),
    "segments": (64, 320),
    "tails": (True,),
    "seed": 7,
    "device": "cuda:1",
    "random_weights": True,
    "tokenizer": "demo",
    "trust_remote_code": True,
    "allow_regression": True,
    "journal": Path("kept.sqlite"),
    "storage": "sqlite:///studies.db",
    "gpus": 2,
    "target_gpu": "H200",
}
WITHOUT_WORKERS = {"journal": None, "storage": None} | {
    entry.field: entry.default for entry in OPTIONS.values() if entry.group == WORKERS
}


def recipe(**options):
    return Recipe.of(BASE | options)


def written(folder, text):
    path = folder / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_every_option_but_the_other_budgets_is_in_the_example():
    assert set(ALL) == set(OPTIONS) - {"budget_rel_mse", "prompts", "scheduler"}
    default = Recipe.of(BASE)
    everything = Recipe.of(ALL)
    differ = {field.name for field in dataclasses.fields(Recipe)} - {"model", "lengths", "out", "prompts", "scheduler"}
    assert all(getattr(everything, name) != getattr(default, name) for name in differ)
    assert default.budget == DEFAULT_BUDGET


def test_dense_last_rows_follow_the_length():
    made = recipe(lengths=(1024, 2048))
    assert [made.last_rows_at(length) for length in (1024, 4096, 8191, 8192, 131072)] == [0, 128, 128, 256, 256]
    assert recipe(last_rows=512).last_rows_at(1024) == 512
    assert recipe(last_rows=512, chunk=4096).last_rows_at(8192) == 512
    record = made.record()
    assert Recipe.from_record(record, made.out).last_rows_at(8192) == 256
    del record["last_rows"]  # as versions before there were any
    assert Recipe.from_record(record, made.out).last_rows_at(8192) == 0


OWN_PROMPTS = BASE | {"prompts": (Path("mine.jsonl"), Path("folder/b"))}


@pytest.mark.parametrize("options", [BASE, ALL, OWN_PROMPTS, BASE | {"budget_rel_mse": 0.5, "check_lengths": ()}])
def test_a_recipe_survives_yaml(options, tmp_path):
    recipe = Recipe.of(options)
    options_again = load_yaml(written(tmp_path, recipe.to_yaml()))
    others = {f"budget_{kind}" for kind in KINDS} - {f"budget_{recipe.budget.kind}"}
    others |= {"ceiling_rel_mse"} - ({"ceiling_rel_mse"} if recipe.budget.kind == "mse" else set())
    assert set(options_again) == set(OPTIONS) - others
    assert Recipe.of(options_again) == recipe
    assert Recipe.of(options_again).to_yaml() == recipe.to_yaml()


def test_yaml_as_people_write_it(tmp_path):
    text = "model: demo\nbudget_mse: 1e-4  # a text to YAML\nlengths: [2048, 1024, 2048]\ntails: [on, off]\n"
    text += "time_limit: 1.5h\nmargin: 1\nout: ~/p.safetensors\n"
    expected = {"model": "demo", "budget_mse": 1e-4, "lengths": (1024, 2048), "tails": (False, True)}
    expected |= {"time_limit": 5400.0, "margin": 1.0, "out": Path.home() / "p.safetensors"}
    assert load_yaml(written(tmp_path, text)) == expected
    as_flags = (
        'lengths: 1024,2048\ntails: "off"\ncheck_lengths: none\nnum_held_out: 3\nkeep_needles: 0.5\nworst_rows: none\n'
    )
    expected = {"lengths": (1024, 2048), "tails": (False,), "check_lengths": (), "num_held_out": 3}
    assert load_yaml(written(tmp_path, as_flags)) == expected | {"keep_needles": 0.5, "worst_rows": None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trial: 3", "has 'trial', which is no option: did you mean trials?"),
        ("1: 2", "has 1, which is no option"),
        ("trials: many", "trials is 'many': expected a whole number from 1 to 1000000, such as 16"),
        ("trials: 1.5", "trials is 1.5: expected a whole number"),
        ("trials:", "trials is None: expected a whole number"),
        ("margin: [1]", r"margin is \[1\]: expected a share above 0 and at most 1"),
        (f"budget_mse: 1{'0' * 400}", "budget_mse is 10+.*: expected a number"),
        ("lengths: 1024", "lengths is 1024: expected a list, each a whole number of tokens"),
        ("tails: [maybe]", r"tails is \['maybe'\]: expected a list, each true or false"),
        ("time_limit: 5 days", "time_limit is '5 days': expected a number of seconds above 0 and at most 31622400"),
        ("random_weights: 1", "random_weights is 1: expected true or false"),
        ("out: [a]", r"out is \['a'\]: expected a file name"),
        ("", "is empty: expected lines such as trials: 16"),
        ("trials: 4\nseed: 1\ntrials: 8\n", "has trials twice: give it once"),
        ("model: [", "is not YAML"),
        ("model: !!python/object/apply:os.getcwd []", "is not YAML .*could not determine a constructor"),
        (b"\xff\xfe\x00", "is not YAML"),
        ("[" * 5000, "is not YAML"),
        ("# " + "x" * 70_000, "is larger than 65536 bytes"),
        # a billion laughs, which must not be printed either
        ("lengths: [&a [1, 1], &b [*a, *a, *a, *a, *a, *a, *a, *a, *a], "
         + ", ".join(f"&c{i} [{', '.join([f'*c{i - 1}' if i else '*b'] * 9)}]" for i in range(12)) + "]",
         "lengths is .*: expected a list"),
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_a_bad_recipe_file_is_one_sentence(text, message, tmp_path):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as raised:
        load_yaml(path)
    assert str(raised.value).startswith(f"recipe {path}")
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


def test_a_recipe_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"none.yaml cannot be read \(No such file or directory\): check the path"):
        load_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_yaml(tmp_path)


def test_what_may_be_null_in_a_file(tmp_path):
    for name in OPTIONS:
        path = written(tmp_path, f"{name}: null")
        if OPTIONS[name].rule.optional:
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
    ceiled = file | {"ceiling_rel_mse": 1e-3}
    assert merged(ceiled, {"budget_mse": 2.0}) == ceiled | {"budget_mse": 2.0}
    assert merged(ceiled, {"budget_rel_mse": 0.1}) == {"model": "demo", "trials": 3, "seed": 2, "budget_rel_mse": 0.1}


def test_two_budgets_are_refused():
    with pytest.raises(ConfigError, match="budget_mse and budget_rel_mse are both given: choose one"):
        recipe(budget_mse=1.0, budget_rel_mse=1.0)
    assert Budget.of({"budget_rel_mse": 0.5}) == Budget("rel_mse", 0.5)


def test_a_budget_in_mse_has_a_ceiling_unless_it_is_switched_off():
    assert Budget.of({"budget_mse": 2.0}) == Budget("mse", 2.0, 1e-2)
    assert Budget.of({"budget_mse": 2.0, "ceiling_rel_mse": 0.5}) == Budget("mse", 2.0, 0.5)
    for off in (None, 0.0):
        assert recipe(budget_mse=2.0, ceiling_rel_mse=off).budget == Budget("mse", 2.0)
        assert recipe(ceiling_rel_mse=off).budget == DEFAULT_BUDGET  # it has none anyway
    made = recipe(budget_mse=1e-4)
    plan = OPTIONS["budget_mse"].line(made), OPTIONS["budget_mse"].line(recipe(budget_mse=1e-4, ceiling_rel_mse=None))
    assert plan == ("mse 0.0001 and rel_mse 0.01, whichever allows a layer less", "mse 0.0001")
    assert made.record()["budget"] == {"kind": "mse", "value": 1e-4, "ceiling_rel_mse": 1e-2}
    older = made.record() | {"budget": {"kind": "mse", "value": 1e-4}}  # of a version without ceilings
    assert Recipe.from_record(older, made.out).budget == Budget("mse", 1e-4)


def test_a_layer_may_have_the_smaller_of_the_two_limits():
    both, alone = Budget("mse", 1e-4, 1e-2), Budget("mse", 1e-4)
    assert Budget("mse", 1e-4, 0.0).limit(5e-4) == alone.limit(5e-4) == 1e-4
    powers = (5e-4, 1e-2, 0.5)
    assert [both.limit(power) for power in powers] == pytest.approx([5e-6, 1e-4, 1e-4])
    assert [alone.limit(power) for power in powers] == [1e-4] * 3
    assert [Budget("rel_mse", 1e-3).limit(power) for power in powers] == [1e-3] * 3
    assert both.limit(0.0) > 0.0  # a layer without output may be dense, and its share of a limit is a number
    made = recipe(budget_mse=1e-4)
    assert [made.binds(both.limit(power)) for power in powers] == ["rel_mse", "mse", "mse"]
    assert recipe(budget_mse=1e-4, ceiling_rel_mse=None).binds(1e-4) is None
    assert recipe(budget_mse=1e-4, budget_scope="model").binds(5e-6) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": ()}, r"lengths is empty: expected a list"),
        ({"lengths": (2048, 1024)}, r"lengths is \(2048, 1024\), not ascending: expected a list"),
        ({"lengths": (100, 1024)}, "length 100 is shorter than one segment of 256"),
        ({"segments": ()}, r"segments is empty: expected a list, each a multiple of 64 from 64 to 65536"),
        ({"segments": (100, 256)}, r"segments is \(100, 256\): expected a list, each a multiple of 64"),
        ({"segments": (256, 131072)}, r"segments is \(256, 131072\)"),
        ({"tails": (True, False)}, r"tails is \(True, False\), not ascending: expected a list, each true or false"),
        ({"check_lengths": (1024,)}, "check length 1024 is calibrated"),
        ({"check_lengths": (512, 1536)}, "check length 512 is below 1024, the shortest that is calibrated"),
        ({"budget_scope": "head"}, "budget_scope is 'head': expected one of layer, model"),
        ({"budget_rel_mse": 1e3}, r"budget_rel_mse is 1000\.0: expected a number above 0 and at most 1"),
        ({"budget_mse": 0.0}, r"budget_mse is 0\.0: expected a number above 0 and at most 1000000, such as 1e-4"),
        (
            {"budget_mse": 1.0, "ceiling_rel_mse": -1e-2},
            r"ceiling_rel_mse is -0\.01: expected a number from 0 to 1 or none",
        ),
        ({"budget_mse": 1.0, "ceiling_rel_mse": float("nan")}, "ceiling_rel_mse is nan: expected a number from 0 to 1"),
        (
            {"budget_mse": 1.0, "ceiling_rel_mse": 2.0},
            r"ceiling_rel_mse is 2\.0: expected a number from 0 to 1 or none",
        ),
        (
            {"ceiling_rel_mse": 0.1},
            r"ceiling_rel_mse 0\.1 goes with budget_mse only, but the budget is rel_mse 0\.001: ",
        ),
        (
            {"budget_rel_mse": 0.1, "ceiling_rel_mse": 0.1},
            r"goes with budget_mse only, but the budget is rel_mse 0\.1: leave it out",
        ),
        ({"time_limit": float("inf")}, "time_limit is inf"),
        ({"worst_rows": -0.1}, r"worst_rows is -0\.1: expected a number from 0 to 1000 or none, such as 0\.7"),
        ({"keep_needles": 1.1}, r"keep_needles is 1\.1: expected a share from 0 to 1"),
        ({"lengths": (4096, 4200)}, "lengths 4096 and 4200 are less than an eighth of an octave apart"),
        ({"journal": BASE["out"]}, "cannot be the journal too: give another --journal or --out"),
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
    check_limit(max(recipe(lengths=(1024,)).all_lengths), 1024)
    check_limit(max(recipe(check_lengths=(4096,)).all_lengths), 4096)
    for made, longest in ((recipe(check_lengths=(4096,)), 4096), (recipe(), 2048)):
        with pytest.raises(ConfigError, match=f"length {longest} is beyond the model's limit of {longest - 1}"):
            check_limit(max(made.all_lengths), longest - 1)


def test_half_of_a_prompt_lies_in_some_prefix():
    assert recipe().segments_for(1024) == (256, 512)
    assert recipe().segments_for(1 << 20) == (256, 512, 1024, 2048)
    assert recipe().segments_for(300) == (256,)  # the shortest is always there
    assert recipe(segments=(64, 192)).segments_for(256) == (64,)


def test_the_journal_is_named_by_the_model_alone():
    assert recipe(model="org/Some_Model").journal_path == Path("profiles/org-some-model.journal.sqlite")
    assert recipe(budget_mse=1.0).journal_path == recipe(budget_rel_mse=0.1).journal_path
    assert recipe(journal=Path("mine")).journal_path == Path("mine")


def test_the_record_holds_what_decides_the_result():
    record = recipe(journal=Path("elsewhere"), prompts=(Path("folder/mine.jsonl"), Path("b"))).record()
    fields = {field.name for field in dataclasses.fields(Recipe)}
    workers = {entry.field for entry in OPTIONS.values() if entry.group == WORKERS}
    left_out = {"out", "journal", "storage", "kv_cache_dtype"}  # the last where it is not auto
    assert set(record) == fields - left_out - workers
    assert record["check_lengths"] == [1536]
    assert record["prompts"] == ["mine.jsonl", "b"]
    assert record["domains"] is None
    assert recipe().record()["domains"] == list(DOMAINS)
    assert record["budget"] == {"kind": "rel_mse", "value": 1e-3}
    assert json.loads(json.dumps(record)) == record


def test_a_recipe_is_read_from_its_record():
    recipe = Recipe.of(ALL)
    again = Recipe.from_record(json.loads(json.dumps(recipe.record())), recipe.out)
    assert again == dataclasses.replace(recipe, **WITHOUT_WORKERS)
    older = recipe.record() | {"method": "s2o"}
    assert Recipe.from_record(older, recipe.out) == again
    with pytest.raises(ValueError, match="heads could choose auto, which only versions before this one let them"):
        Recipe.from_record(older | {"method": "auto"}, recipe.out)


def test_a_record_of_text_that_is_gone_is_refused():
    record = recipe().record()
    with pytest.raises(ConfigError, match=r"domains is .*'stdlib'"):
        Recipe.from_record(record | {"domains": ["stdlib"]}, Path("p"))
    del record["domains"]
    with pytest.raises(ValueError, match=r"built-in text of a version of S2O before 0\.2"):
        Recipe.from_record(record, Path("p"))


def test_one_file_of_prompts_may_be_given_as_it_is(tmp_path):
    assert load_yaml(written(tmp_path, "prompts: mine.jsonl\n")) == {"prompts": (Path("mine.jsonl"),)}
    assert load_yaml(written(tmp_path, "prompts: [a.jsonl, b c]\n")) == {"prompts": (Path("a.jsonl"), Path("b c"))}
    assert OPTIONS["prompts"].read(Path("mine.jsonl")) == (Path("mine.jsonl"),)
