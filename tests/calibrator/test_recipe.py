"""Recipes: which are allowed, and that each survives YAML and its record."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.recipe import DEFAULT_BUDGET, DOMAINS, OPTIONS, WORKERS, Budget, Recipe, check_limit, load_yaml
from s2o_runtime.errors import ConfigError
from s2o_runtime.profile.record import BUDGET_KINDS
from support.options import values_of

BASE = {"model": "demo", "lengths": (1024, 2048), "out": Path("profiles/p.safetensors")}
WITHOUT_WORKERS = {"journal": None, "storage": None} | {
    option.field: option.default for option in OPTIONS.values() if option.group == WORKERS
}
TOGETHER = {  # options that have to fit others, as sets of them that do
    "lengths": [{"lengths": (1 << 17, 1 << 18)}, {"lengths": (1 << 20,)}],
    "check_lengths": [{}, {"check_lengths": None}, {"check_lengths": ()}, {"check_lengths": (3 << 19, 3 << 20)}],
    "budgets": [{}, {"budget_rel_mse": 0.5}, {"budget_mse": 1e-5}, {"budget_mse": 0.1, "ceiling_rel_mse": None},
                {"budget_kl": 1e-3}, {"budget_rel_mse": 0.5, "random_weights": True}, {"random_weights": True},
                {"budget_mse": 1e-5, "ceiling_rel_mse": 2e-3, "kv_cache_dtype": "fp8"},
                {"kv_cache_dtype": "fp8"}],
    "texts": [{}, {"domains": ("prose", "chinese")}, {"prompts": (Path("mine.jsonl"), Path("folder/b"))}],
    "workers": [{}, {"gpus": 2}, {"scheduler": "tcp://head:8786", "target_gpu": "H200"}],
    "files": [{"out": Path("profiles/p.safetensors")}],
}  # fmt: skip
FITTING = {name for choices in TOGETHER.values() for options in choices for name in options}


@st.composite
def options_that_fit(draw):
    options = {"model": draw(values_of(OPTIONS["model"].rule))}
    for name in draw(st.sets(st.sampled_from(sorted(OPTIONS.keys() - FITTING - {"model"})))):
        options[name] = draw(values_of(OPTIONS[name].rule))
    for choices in TOGETHER.values():
        options |= draw(st.sampled_from(choices))
    return options


def recipe(**options):
    return Recipe.from_options(BASE | options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("recipes")


def save(folder, text):
    path = folder / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@settings(max_examples=50, deadline=None)
@given(options=options_that_fit())
def test_a_recipe_survives_yaml_and_its_record(options, folder):
    made = Recipe.from_options(options)
    assert all(
        getattr(made, OPTIONS[name].field) == value
        for name, value in options.items()
        if OPTIONS[name].field != "budget"
    )
    from_yaml = load_yaml(save(folder, made.to_yaml()))
    others = {f"budget_{kind}" for kind in BUDGET_KINDS} - {f"budget_{made.budget.kind}"}
    others |= set() if made.budget.kind == "mse" else {"ceiling_rel_mse"}
    assert set(from_yaml) == set(OPTIONS) - others
    assert Recipe.from_options(from_yaml) == made
    record = json.loads(json.dumps(made.record()))
    again = Recipe.from_record(record, made.out)
    names = made.prompts and tuple(Path(path.name) for path in made.prompts)  # of prompts their names alone are kept
    assert again == dataclasses.replace(made, **WITHOUT_WORKERS, prompts=names, check_lengths=made.checked_lengths,
                                        domains=made.used_domains or None)  # fmt: skip
    assert again.record() == record


def test_yaml_as_people_write_it(tmp_path):
    text = "model: demo\nbudget_mse: 1e-4  # a text to YAML\nlengths: [2048, 1024, 2048]\ntails: [on, off]\n"
    text += "time_limit: 1.5h\nmargin: 1\nout: ~/p.safetensors\nprompts: mine.jsonl\ncheck_lengths: none\n"
    assert load_yaml(save(tmp_path, text + 'worst_rows: none\nsegments: 128,64\nlookbacks: "256"\n')) == {
        "model": "demo", "budget_mse": 1e-4, "lengths": (1024, 2048), "tails": (False, True), "time_limit": 5400.0,
        "margin": 1.0, "out": Path.home() / "p.safetensors", "prompts": (Path("mine.jsonl"),), "check_lengths": (),
        "worst_rows": None, "segments": (64, 128), "lookbacks": (256,),
    }  # fmt: skip


LAUGHS = ", ".join(f"&c{i} [{', '.join([f'*c{i - 1}' if i else '*b'] * 9)}]" for i in range(12))


@pytest.mark.parametrize(("text", "message"), [
    ("trial: 3", r"has 'trial', which is no option: did you mean trials\?"),
    ("1: 2", "has 1, which is no option"),
    ("trials: many", "trials is 'many': expected a whole number from 1 to 1000000, such as 16"),
    ("", "is empty: expected lines such as trials: 16"),
    ("[1]", "holds a list: expected lines such as trials: 16"),
    ("trials: 4\nseed: 1\ntrials: 8\n", "has trials twice: give it once"),
    ("model: !!python/object/apply:os.getcwd []", "is not YAML .*could not determine a constructor"),
    (b"\xff\xfe\x00", "is not YAML"),
    ("[" * 600, "is not YAML"),
    ("# " + "x" * 70_000, "is larger than 65536 bytes"),
    # a billion laughs, which must not be printed either
    (f"lengths: [&a [1, 1], &b [*a, *a, *a, *a, *a, *a, *a, *a, *a], {LAUGHS}]", "lengths is .*: expected a list"),
    (None, r"cannot be read \(No such file or directory\): check the path"),
], ids=lambda value: repr(value)[:40])  # fmt: skip
def test_a_bad_recipe_file_is_one_sentence(text, message, tmp_path):
    path = tmp_path / "none.yaml" if text is None else save(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as raised:
        load_yaml(path)
    assert str(raised.value).startswith(f"recipe {path}")
    assert (len(str(raised.value)) < 500, "\n" in str(raised.value)) == (True, False)


def test_answers_are_held_by_default_but_not_those_of_random_weights():
    assert recipe().budget == DEFAULT_BUDGET == Budget("kl", 2e-3)
    assert recipe(random_weights=True).budget == Budget("rel_mse", 1e-3)
    assert [Budget(kind, 1e-3).unit for kind in BUDGET_KINDS] == ["mse", "rel_mse", "rel_mse"]


def test_a_budget_in_mse_has_a_ceiling_unless_it_is_switched_off():
    assert Budget.from_options({"budget_mse": 2.0}) == Budget("mse", 2.0, 1e-2)
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
    both, alone, powers = Budget("mse", 1e-4, 1e-2), Budget("mse", 1e-4), (5e-4, 1e-2, 0.5)
    assert Budget("mse", 1e-4, 0.0).limit(5e-4) == alone.limit(5e-4) == 1e-4
    assert [both.limit(power) for power in powers] == pytest.approx([5e-6, 1e-4, 1e-4])
    assert [alone.limit(power) for power in powers] == [1e-4] * 3
    assert [Budget("rel_mse", 1e-3).limit(power) for power in powers] == [1e-3] * 3
    assert both.limit(0.0) > 0.0  # a layer without output may be dense, and its share of a limit is a number
    made = recipe(budget_mse=1e-4)
    assert [made.binds(both.limit(power)) for power in powers] == ["rel_mse", "mse", "mse"]
    assert recipe(budget_mse=1e-4, ceiling_rel_mse=None).binds(1e-4) is None


@pytest.mark.parametrize(("options", "message"), [
    ({"lengths": (100, 1024)}, "length 100 is shorter than one segment of 256"),
    ({"check_lengths": (1024,)}, "check length 1024 is calibrated"),
    ({"check_lengths": (512, 1536)}, "check length 512 is below 1024, the shortest that is calibrated"),
    ({"budget_mse": 1.0, "budget_rel_mse": 1.0}, "budget_mse and budget_rel_mse are both given: choose one"),
    ({"budget_kl": 1.0, "budget_mse": 1.0}, "budget_mse and budget_kl are both given: choose one"),
    ({"budget_kl": 1e-3, "random_weights": True}, r"have no answers .*\(kl-0\.001\).*: use budget_rel_mse"),
    ({"budget_rel_mse": 0.1, "ceiling_rel_mse": 0.1}, r"mse only, but the budget is rel_mse 0\.1: leave it out"),
    ({"prompts": (Path("a"),), "domains": ("code",)}, "domains code are of the built-in text, but prompts are"),
    ({"domains": ("code", "code")}, "domains code,code name one twice: leave one out"),
    ({"gpus": 2, "scheduler": "tcp://a:1"}, "gpus 2 starts workers here, but scheduler tcp://a:1 has its own"),
    ({"scheduler": "head-node"}, "scheduler 'head-node' is no address: expected one like tcp://head-node:8786"),
    ({"target_gpu": "H100"}, "target_gpu is for many workers, or for a plan"),
    ({"journal": BASE["out"]}, "cannot be the journal too: give another --journal or --out"),
])  # fmt: skip
def test_options_that_do_not_fit_each_other(options, message):
    with pytest.raises(ConfigError, match=message):
        recipe(**options)


@pytest.mark.parametrize(("lengths", "expected"), [
    ((1024,), ()),
    ((512, 8192, 131072), (2048, 32768)),
    ((1024, 2048), (1536,)),  # 1448.2
    ((512, 600), ()),  # 554.3 is nearest to 512, which is calibrated
    ((600, 700), ()),  # 648.1 is nearest to 768, which is not between them
])  # fmt: skip
def test_a_length_between_two_neighbours_is_checked(lengths, expected):
    assert recipe(lengths=lengths).checked_lengths == expected
    for given_lengths in ((), (5000 * 256,)):
        assert recipe(lengths=lengths, check_lengths=given_lengths).all_lengths == lengths + given_lengths


def test_a_prompt_is_not_longer_than_the_model_reads():
    check_limit(1024, 1024)
    with pytest.raises(ConfigError, match="length 1024 is beyond the model's limit of 1023"):
        check_limit(1024, 1023)


def test_segments_and_dense_rows_follow_the_length():
    """Half of a prompt lies in some prefix; the shortest segment is always there."""
    made = recipe()
    assert [len(made.select_segments(length)) for length in (300, 1024, 1 << 20)] == [1, 2, 4]
    assert recipe(segments=(64, 192)).select_segments(256) == (64,)
    assert [made.count_last_rows(length) for length in (1024, 4096, 8191, 8192, 131072)] == [0, 128, 128, 256, 256]
    assert recipe(last_rows=512).count_last_rows(1024) == 512


def test_the_journal_is_named_by_the_model_alone():
    assert recipe(model="org/Some_Model").journal_path == Path("profiles/org-some-model.journal.sqlite")
    assert recipe(budget_mse=1.0).journal_path == recipe(budget_rel_mse=0.1).journal_path


def test_the_record_holds_what_decides_the_result():
    record = recipe(journal=Path("elsewhere"), prompts=(Path("folder/mine.jsonl"), Path("b"))).record()
    fields = {field.name for field in dataclasses.fields(Recipe)}
    assert set(record) == fields - {"out", *WITHOUT_WORKERS, "kv_cache_dtype"}  # the last where it is not auto
    assert (record["check_lengths"], record["prompts"], record["domains"]) == ([1536], ["mine.jsonl", "b"], None)
    assert recipe().record()["domains"] == list(DOMAINS)


@pytest.mark.parametrize(("change", "message"), [
    ({"method": "auto"}, "method"),
    ({"domains": ["stdlib"]}, r"domains is .*'stdlib'"),
])  # fmt: skip
def test_a_record_of_another_version_is_refused_or_read(change, message):
    record = recipe().record()
    older = {name: value for name, value in record.items() if name != "last_rows"} | {"grains": [4]}
    assert Recipe.from_record(older, BASE["out"]).count_last_rows(8192) == 0  # before there were any
    with pytest.raises((ValueError, KeyError), match=message):
        Recipe.from_record(record | change, Path("p"))
