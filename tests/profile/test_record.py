"""The record: what its types and the runtime read of it, whatever is in it; a change of it changes nothing else."""

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.record import PredictedLayer, PredictedLength, ProvenLayer, ProvenLength, Record, update_record
from s2o_runtime.profile import load_profile
from s2o_runtime.profile.record import list_certified, read_budget, read_limits
from support.golden_profiles import minimal, path_of

names = st.sampled_from(
    ["budget", "kind", "value", "scope", "problems", "versions", "data", "held_out", "predicted", "layers", "length"]
    + ["limit", "density", "needles", "retiled", "kinds", "from", "recipe", "calibration", "sha256", "new"]
    + ["certificate", "lengths", "prompts", "ceiling_rel_mse"]
)
plain = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, "mse", "kl", "layer", "text"])
documents = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=5), max_leaves=30
)
numbers = st.integers(1, 3) | st.just(0.5) | plain
limits = st.lists(st.fixed_dictionaries({"limit": numbers}), max_size=3)
length_parts = st.lists(st.fixed_dictionaries({"length": numbers, "layers": limits}), max_size=3)
kinds = st.sampled_from(["mse", "rel_mse", "kl", "love", None, []])
scopes = st.sampled_from(["layer", "model", "all", 3])
budgets = st.fixed_dictionaries({"kind": kinds, "value": numbers, "scope": scopes, "ceiling_rel_mse": numbers})
records = st.fixed_dictionaries(
    {},
    optional={
        "budget": budgets | documents,
        "held_out": length_parts | documents,
        "certificate": st.fixed_dictionaries({"lengths": length_parts}) | documents,
        "new": documents,
    },
) | st.dictionaries(names, documents)


@settings(max_examples=100, deadline=None)
@given(document=records)
def test_any_record_is_read_and_the_runtime_reads_what_its_types_do(document):
    record = Record.from_json(document)
    assert Record.from_json(record.to_json()) == record
    budget = record.budget or Record.from_json({"budget": {}}).budget
    older = isinstance(document.get("budget"), dict) and document["budget"].get("scope") == "model"
    expected = (None,) * 3 if older else (budget.kind, budget.value, budget.ceiling_rel_mse)
    assert read_budget(document) == expected
    assert [row.get("length") for row in list_certified(document)] == [
        row.get("length") for row in (document["certificate"]["lengths"] if record.certified_lengths else ())
    ]
    for layer in range(2):
        limits = {
            proven.length: proof.limit
            for proven in record.held_out or ()
            for proof in (proven.layers or ())[layer : layer + 1]
            if proven.length is not None and proof.limit is not None
        }
        assert read_limits(document, layer) == limits


@settings(max_examples=50, deadline=None)
@given(document=records)
def test_a_change_leaves_all_else_as_it_was(document):
    """1 and 1.0 stay apart, null and absent too, and what this version does not understand is kept."""
    changed = update_record(replace(minimal(), record=document), proof="none", certificate=None)
    kept = {name: value for name, value in document.items() if name not in ("proof", "certificate")}
    assert json.dumps(changed, sort_keys=True) == json.dumps(kept | {"proof": "none"}, sort_keys=True)


def test_every_field_of_a_full_record_is_understood():
    document = load_profile(path_of("schema8_lookback")).record
    record = Record.from_json(document)
    assert json.dumps(record.to_json(), sort_keys=True) == json.dumps(document, sort_keys=True)
    assert (record.budget.kind, record.held_out[0].needles) == ("rel_mse", (7, 8))
    assert record.retiled.timed[0].layers == ((8192, 0), (8192, 1))


def test_a_value_of_another_type_counts_as_missing():
    wrong = {"budget": [], "objective": 3, "problems": ["a", 1], "versions": {"torch": 2}, "retiled": None}
    wrong |= {"held_out": [{"length": 512}, 7]}
    record = Record.from_json(wrong)
    assert [getattr(record, field) for field in wrong] == [None] * len(wrong)
    length = {"length": True, "needles": [1], "kl": 2, "new": [3]}  # in a node that value alone is missing
    record = Record.from_json({"budget": {"kind": "love", "value": 1}, "held_out": [length]})
    assert (record.budget.kind, record.budget.value) == (None, 1)
    assert [(proven.length, proven.needles, proven.kl) for proven in record.held_out] == [(None, None, 2)]


def test_densities_are_the_proven_ones_or_else_the_predicted_ones():
    layers = tuple(ProvenLayer(density=density) for density in (0.25, 0.5))
    predicted = tuple(
        PredictedLength(length=length, layers=(PredictedLayer(density=0.75),) * 2) for length in (512, 1024)
    )
    record = Record(held_out=(ProvenLength(length=512, layers=layers),), predicted=predicted)
    assert record.densities(512, 2) == ("held out", [0.25, 0.5])
    assert record.densities(1024, 2) == ("predicted", [0.75, 0.75])
    assert record.densities(1024, 3) == record.densities(2048, 2) == (None, [])
