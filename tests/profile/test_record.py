"""The typed record: what its one reader understands, and that reading and writing change nothing."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s2o_runtime.profile import load_profile
from s2o_runtime.profile.record import PredictedLayer, PredictedLength, ProvenLayer, ProvenLength, Record
from support.golden_profiles import path_of

names = st.sampled_from(
    ["budget", "kind", "value", "scope", "problems", "versions", "data", "held_out", "predicted", "layers", "length"]
    + ["limit", "density", "needles", "retiled", "kinds", "from", "recipe", "calibration", "sha256", "extra", "new"]
)
plain = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, "mse", "layer", "text"])
documents = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=5), max_leaves=30
)


@settings(max_examples=100, deadline=None)
@given(document=st.dictionaries(names, documents))
def test_reading_and_writing_change_nothing(document):
    """Whatever is in it: 1 and 1.0 stay apart, null and absent too."""
    record = Record.from_json(document)
    assert json.dumps(record.to_json(), sort_keys=True) == json.dumps(document, sort_keys=True)
    assert Record.from_json(record.to_json()) == record


def test_every_field_of_a_full_record_is_understood():
    def parts(value):
        if isinstance(value, tuple):
            return [part for item in value for part in parts(item)]
        if not hasattr(value, "formats"):
            return []
        inner = [part for field in value.formats() for part in parts(getattr(value, field.name))]
        return [value, *inner]

    record = load_profile(path_of("schema8_grain4")).record
    assert len(parts(record)) > 15
    assert all(part.extra == {} for part in parts(record))
    assert record.budget.kind == "rel_mse"
    assert record.held_out[0].needles == (7, 8)
    assert record.held_out[0].layers[0].tightened == 1
    assert record.retiled.made_on == "NVIDIA H200 (sm_90, 132 SMs)"
    assert record.retiled.timed[0].layers == ((8192, 0), (8192, 1))


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"budget": []}, "budget"),
        ({"objective": 3}, "objective"),
        ({"problems": ["a", 1]}, "problems"),
        ({"versions": {"torch": 2}}, "versions"),
        ({"held_out": [{"length": 512}, 7]}, "held_out"),
        ({"retiled": None}, "retiled"),
    ],
)
def test_a_value_of_another_type_counts_as_missing_and_is_kept(document, field):
    record = Record.from_json(document)
    assert getattr(record, field) is None
    assert record.extra == document


def test_inside_a_part_only_what_has_another_type_is_missing():
    record = Record.from_json(
        {"budget": {"kind": "love", "value": 1}, "held_out": [{"length": True, "needles": [1], "kl": 2, "new": [3]}]}
    )
    assert (record.budget.kind, record.budget.value, record.budget.extra) == (None, 1, {"kind": "love"})
    (length,) = record.held_out
    assert (length.length, length.needles, length.kl) == (None, None, 2)
    assert length.extra == {"length": True, "needles": [1], "new": [3]}


def test_what_is_changed_takes_the_place_of_what_was_not_understood():
    record = Record.from_json({"proof": 3, "new": 1})
    assert Record(proof="none", extra=record.extra).to_json() == {"proof": "none", "new": 1}


def proven(length, *limits):
    return ProvenLength(length=length, layers=tuple(ProvenLayer(limit=limit) for limit in limits))


def test_limits_are_those_of_the_proof():
    record = Record(held_out=(proven(512, 0.1, 0.2), proven(1024, 0.3), proven(None, 0.4), proven(2048, None, 0.0)))
    assert [record.limits(layer) for layer in range(3)] == [{512: 0.1, 1024: 0.3}, {512: 0.2, 2048: 0.0}, {}]
    assert Record().limits(0) == {}


def test_densities_are_the_proven_ones_or_else_the_predicted_ones():
    layers = tuple(ProvenLayer(density=density) for density in (0.25, 0.5))
    predicted = tuple(
        PredictedLength(length=length, layers=(PredictedLayer(density=0.75),) * 2) for length in (512, 1024)
    )
    record = Record(held_out=(ProvenLength(length=512, layers=layers),), predicted=predicted)
    assert record.densities(512, 2) == ("held out", [0.25, 0.5])
    assert record.densities(1024, 2) == ("predicted", [0.75, 0.75])
    assert record.densities(1024, 3) == record.densities(2048, 2) == (None, [])


def test_the_record_needs_no_torch():
    program = "import sys, s2o_runtime.profile.record; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"
    )
