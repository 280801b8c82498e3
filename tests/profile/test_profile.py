"""The file of a profile: what is written is read again, and what no profile says is refused by name."""

import copy
import dataclasses
import json
import os
import re
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from s2o_runtime.config import HeadConfig, LayerConfig, TileConfig
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.errors import ConfigError, InputError, ProfileError
from s2o_runtime.files import write_atomically
from s2o_runtime.identity import Geometry
from s2o_runtime.profile import Profile, load_profile, save_profile, serialize
from s2o_runtime.profile import file as profile_file
from s2o_runtime.profile.file import TILE_FIELDS
from support.golden_profiles import GOLDEN, field_paths, path_of, values_of
from support.profiles import FORMAT, document_of, file_of, json_values, leaves, profiles

GEOMETRY = Geometry("llama", 2, 3, 1, 64)


def layer(tau, segment=256, **tile):
    ranked = HeadConfig(tau * 4, segment, representatives=16, tail="mean")
    heads = (HeadConfig(tau, segment), ranked, HeadConfig(0.0, segment, "dense"))
    return LayerConfig(heads, dataclasses.replace(TileConfig(128, 64, 4, 8, 2), **tile))


def profile(**changes):
    layers = ((layer(0.25), layer(0.5, 512)), (layer(1.0), layer(2.0, 512)))
    record = {"budget": {"kind": "mse", "value": 1e-4}, "note": "ü"}
    device = DeviceIdentity("cuda", "NVIDIA H200", (9, 0), 132, 1 << 37)
    unchanged = Profile("demo", GEOMETRY, "f" * 64, device, (1024, 4096), layers, record)
    return dataclasses.replace(unchanged, **changes)


DATA = serialize(profile())
WITH_LAST_ROWS = dataclasses.replace(layer(0.25), last_rows=256)
LAST_ROWS_DATA = serialize(profile(layers=((WITH_LAST_ROWS, layer(0.5)), (layer(1.0), layer(2.0)))))
DOCUMENT, TENSORS = document_of(DATA), load(DATA)  # of a profile that nobody changed
FOREIGN_VALUES = json_values | st.floats() | st.sampled_from([10**30, -(2**63), 2**63, "\ud800", "\x00", "x" * 5000])


def digested(document, tensors):
    """The bytes of a profile that says this and has not been damaged."""
    return file_of(document | {"digest": profile_file._compute_digest(document, tensors)}, tensors)


def outcome(data, folder):
    """Return what loading bytes ends in: a profile, or the sentence of a ProfileError; anything else is a bug."""
    path = folder / "fuzzed.safetensors"
    path.write_bytes(data)
    try:
        return load_profile(path)
    except ProfileError as error:
        sentence = str(error)
    assert sentence.startswith(str(path))
    assert len(sentence) < 1000
    return sentence.removeprefix(str(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles")


@settings(max_examples=40, deadline=None)
@given(profile=profiles())
def test_what_is_written_is_read_again_and_has_the_same_bytes(folder, profile):
    path = folder / "p.safetensors"
    save_profile(profile, path)
    assert load_profile(path) == profile
    assert path.read_bytes() == serialize(load_profile(path)) == serialize(profile)
    assert os.stat(path).st_mode & 0o777 == 0o644


@settings(max_examples=100, deadline=None)
@given(field=st.sampled_from(leaves(DOCUMENT)), value=FOREIGN_VALUES)
def test_a_field_of_any_value_is_refused_by_its_name_or_harmless(folder, field, value):
    """Whatever it is, with a digest that fits it; with the digest of before, it is always refused."""
    document = copy.deepcopy(DOCUMENT)
    *outer, last = field
    reduce(getitem, outer, document)[last] = value
    try:
        data = digested(document, TENSORS)
    except (ValueError, AttributeError):  # half of a surrogate pair; no such text is ever hashed
        data = file_of(document, TENSORS)
    loaded = outcome(data, folder)
    if isinstance(loaded, Profile):
        assert outcome(serialize(loaded), folder) == loaded
    else:  # sizes are found wrong by the tensors that they do not fit, and by one another
        assert any(word in loaded for word in (*map(str, field), *TENSORS, *profile_file.SIZES, "digest")), loaded
    assume(document != DOCUMENT)
    assert isinstance(outcome(file_of(document, TENSORS), folder), str)


TAU = TENSORS["tau"]


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("tau", None, "tensor 'tau' is missing"),
        ("other", TAU.clone(), "tensor 'other' is not part"),
        ("tau", TAU.double(), "tensor tau is torch.float64"),
        ("tau", TAU[None], "tensor tau is torch.float32 (1, "),
    ],
)
def test_other_tensors_are_refused_by_name_and_other_numbers_by_the_digest(name, tensor, said, tmp_path):
    tensors = {key: value for key, value in (TENSORS | {name: tensor}).items() if value is not None}
    assert said in outcome(digested(DOCUMENT, tensors), tmp_path)
    assert "digest" in outcome(file_of(DOCUMENT, TENSORS | {"tau": TAU + 1}), tmp_path)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_files_are_read_for_ever(name):
    """Files that were written once: what is in them; the one of the newest version is written again byte for byte."""
    data, profile = path_of(name).read_bytes(), load_profile(path_of(name))
    assert values_of(profile) == json.loads(path_of(name).with_suffix(".json").read_text(encoding="utf-8"))
    assert profile.record == document_of(data)["record"]
    assert (serialize(profile) == data) == (name == GOLDEN[0])


def test_heads_that_only_earlier_versions_could_run_are_dense(tmp_path):
    """Of a linear tail, as no golden file has; written so; a head that was dense, the last one, does not count."""
    tensors = TENSORS | {"tail": TENSORS["tail"].clone()}
    tensors["tail"][0, 0] = torch.tensor([0, 2, 2])
    loaded = outcome(digested(DOCUMENT, tensors), tmp_path)
    (first, *others), *buckets = profile().layers
    dense = [dataclasses.replace(head, mode="dense", tail="none", representatives=1) for head in first.heads[1:]]
    heads = (first.heads[0], *dense)
    assert loaded.layers == ((dataclasses.replace(first, heads=heads), *others), *buckets)
    assert (loaded.unsupported_heads, loaded.record) == (1, profile().record)
    again = outcome(serialize(loaded), tmp_path)
    assert (again, again.unsupported_heads) == (loaded, 0)


# fields that only some profiles have, beside those of the golden file
OPTIONAL = """
model.base_fingerprint model.config model.layer_numbers model.other_layers record.budget.ceiling_rel_mse
record.certificate.lengths[].answers.quoted record.certificate.lengths[].layers[].binds
record.certificate.lengths[].layers[].rel_mse
record.held_out[].layers[].binds record.recipe.kv_cache_dtype record.recipe.last_rows record.recipe.tokenizer
""".split()  # noqa: SIM905


def test_the_format_names_every_field_and_tensor_and_no_other():
    text = FORMAT.read_text("utf-8")
    rows = {row.removesuffix("[]") for row in re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)}
    fields = field_paths(document_of(path_of(GOLDEN[0]).read_bytes())) | set(OPTIONAL)
    fields = {re.sub(r"\.versions\..*", ".versions", field) for field in fields}
    parents = {row for row in rows if any(field.startswith((f"{row}.", f"{row}[]")) for field in fields)}
    assert rows - parents == fields | set(profile_file.TENSORS | profile_file.OPTIONAL_TENSORS)
    assert all(f"`{name}`" in text for name in TILE_FIELDS)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda folder: load_profile(None), "load_profile has a NoneType"),
        (lambda folder: save_profile(folder / "p", profile()), "save_profile has a .*Path and a Profile"),
        (lambda folder: save_profile(profile(), None), "save_profile has a Profile and a NoneType"),
        (lambda folder: save_profile(profile(), folder / "no" / "p"), "no is no folder"),
    ],
)
def test_arguments_of_another_kind_are_named(call, words, tmp_path):
    with pytest.raises(InputError, match=words):
        call(tmp_path)
    assert not list(tmp_path.iterdir())


MIXED = {"layer_numbers": [1, 3], "other_layers": {"linear_attention": 1, "sliding_attention": 1}}


@pytest.mark.parametrize(
    ("path", "values", "named"),
    [
        ("schema", range(1, 8), "schema . is of an older version .*: calibrate again"),
        ("schema", [9], "schema 9 is of a newer version of S2O .* reads 8: install that"),
        ("model.*", [{"layers": 1 << 14, "query_heads": 1 << 14}], "make 536870912 heads: at most 1048576"),
        ("model.layers", [0, (1 << 14) + 1], "field model.layers is"),
        ("model.kv_heads", [2], "field model.kv_heads is 2: expected a divisor of 3"),
        ("device.sm_count", [-1, (1 << 16) + 1], "field device.sm_count is"),
        ("device.capability", [[9], [True, 0], [9, 1000], [-1, 0], [9, 0, 0]], "field device.capability is"),
        ("lengths", [[], [1.5, 2], [True, 2], [0, 2], [1, 1 << 25], [*range(1, 258)]], "field lengths is"),
        ("lengths", [[4096, 1024], [1024, 1024]], "lengths .* are not ascending"),
        ("model.layer_numbers", [[1], [3, 1], [1, 4], [1, 1], [True, 3], 3], "field model.layer_numbers is"),
        ("model.other_layers", [{}, {"linear_attention": 0}, {"a": True}, []], "field model.other_layers is"),
    ],
)  # fmt: skip
def test_a_document_that_says_what_no_profile_does_is_refused_by_name(tmp_path, path, values, named):
    """Although its digest is right."""
    for value in values:
        document = copy.deepcopy(DOCUMENT)
        *outer, last = path.split(".")
        if last in MIXED:
            document["model"] |= MIXED
        holder = document[outer[0]] if outer else document
        holder |= value if last == "*" else {last: value}
        assert re.search(named, outcome(digested(document, TENSORS), tmp_path)), value


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("mode", [2]), ("stop_rule", [1, 3]), ("row_reduce", [1]), ("representatives", [0, 3]), ("tail", [3]),
        ("grain", [0, 16]), ("scores", [2]), ("tile[specialized]", [-1, 2]), ("last_rows", [64]), ("lookback", [0, 32]),
    ],
)  # fmt: skip
def test_tensors_that_say_what_there_is_not_are_neither_read_nor_written(tmp_path, monkeypatch, name, values):
    for value in values:
        tensors = load(LAST_ROWS_DATA)
        tensor, place = (tensors["tile"], TILE_FIELDS.index("specialized")) if "[" in name else (tensors[name], 0)
        tensor.flatten()[place] = value
        sentence = f"tensor {name} holds {value}: expected one of "
        assert sentence in outcome(digested(DOCUMENT, tensors), tmp_path)
        monkeypatch.setattr(profile_file, "_make_tensors", lambda _, tensors=tensors: tensors)
        with pytest.raises(ProfileError, match=re.escape(sentence)):
            save_profile(profile(), tmp_path / "p.safetensors")


def test_a_file_is_read_whatever_torch_puts_tensors_on_by_default(tmp_path):
    """vLLM builds its layers under the GPU as the default device."""
    save_profile(profile(), path := tmp_path / "p.safetensors")
    with torch.device("meta"):
        assert load_profile(path) == load_profile(path)


def test_truncated_foreign_and_missing_files(tmp_path):
    for length in (0, 4, 100, len(DATA) - 1):
        assert "damaged or foreign" in outcome(DATA[:length], tmp_path)
    assert "not an S2O profile" in outcome(save({"weight": torch.zeros(3)}), tmp_path)
    for missing in (tmp_path / "{name}.safetensors", tmp_path):
        with pytest.raises(ProfileError, match=re.escape(str(missing))):
            load_profile(missing)


places = st.integers(0, len(DATA) - 1) | st.integers(0, 16) | st.integers(0, 10**9).map(lambda n: n % len(DATA))
pieces = st.binary(min_size=1, max_size=12) | st.sampled_from(
    [b'"', b"{", b"[" * 9, b"9" * 30, b"1e999", b"null", b","]
)


@settings(max_examples=200, deadline=None)
@given(damage=st.lists(st.tuples(st.sampled_from(["cut", "flip", "insert", "delete"]), places, pieces), min_size=1))
def test_damaged_bytes_end_in_profile_errors_only(folder, damage):
    data = bytearray(DATA)
    for action, place, piece in damage:
        if action == "cut":
            del data[place:]
        elif action == "insert":
            data[place:place] = piece
        else:
            data[place : place + len(piece)] = piece if action == "flip" else b""
    loaded = outcome(data, folder)
    assert isinstance(loaded, str) or loaded == profile()


DEEP = "[" * 100_000 + "]" * 100_000


def size(header):  # the bytes with which a safetensors file says how long its header is
    return header.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (size(1 << 40), "its header is cut off"),
        (size(10 << 20) + bytes(10 << 20), "its header has 10485760 bytes, a profile's at most"),
        (size(2) + b"[]", "its header is no object"),
        (size(2) + b"\xff\xff", "can't decode"),
        *((file_of(text, TENSORS), message) for text, message in (
            (f'{{"schema":7,"record":{DEEP}}}', "its contents cannot be read"),
            (f'{{"schema":7,"record":{"[" * 17}{"]" * 17}}}', r"field record\[0\].* is too deep: expected at most 16"),
            ('{"schema":7,"record":{"a":{"b":1,"b":2}}}', "an object has 'b' twice"),
            (f'{{"schema":{"9" * 5000}}}', "field schema is inf: expected a finite number"),
            ('{"record":{"a":[0,1e999]}}', r"field record.a\[1\] is inf: expected a finite number"),
            ('{"record":{"a":NaN}}', "field record.a is nan: expected a finite number"),
            ('{"schema":9223372036854775808}', "field schema has 64 bits: expected an integer of at most 63"),
            ('{"model":{"name":"\\ud800"}}', r"field model.name is '\\ud800': expected valid Unicode"),
            ('{"\\udfff":1}', r"field '\\udfff' has a name that is no text"),
            (" " * ((4 << 20) + 1), "its document has 4194305 characters: a profile's has at most 4194304"),
            ("", "its contents cannot be read"),
            ("3", "its document is an integer: expected an object"),
            ("[{}]", "its document is a list: expected an object"),
        )),
    ],
    ids=lambda case: case[:40] if isinstance(case, str) else "",
)  # fmt: skip
def test_files_are_bounded_and_strict(tmp_path, data, message):
    """Headers, tensors and documents."""
    assert re.search(message, outcome(data, tmp_path))


def test_fields_that_are_not_known_are_ignored(tmp_path):
    """Later versions may add these without another schema."""
    document = DOCUMENT | {"new": [1], "device": DOCUMENT["device"] | {"driver": "x"}}
    assert outcome(digested(document, TENSORS), tmp_path) == profile()


def test_files_that_are_endless_or_no_files_are_refused(tmp_path):
    path = tmp_path / "p.safetensors"
    path.write_bytes(b"")
    os.truncate(path, 1 << 40)
    with pytest.raises(ProfileError, match="is larger than 33554432 bytes: it is not a profile"):
        load_profile(path)
    os.mkfifo(tmp_path / "fifo")
    for other in (tmp_path / "fifo", "/dev/zero"):
        with pytest.raises(ProfileError, match="is not a file: check the path"):
            load_profile(other)


FEW_HEADS = LayerConfig(layer(0.25).heads[:2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ((FEW_HEADS, FEW_HEADS),) * 2}, r"\[\[2, 2\], \[2, 2\]\] heads: expected \[\[3, 3\], \[3, 3\]\]"),
        (float("nan"), "field record.a is nan: expected a finite number"),
        (Path("/x"), "field record.a is a PosixPath: expected a JSON value"),
        ({1: 2}, "field record.a.1 has a name that is no text"),
        ("\ud800", r"field record.a is '\\ud800': expected valid Unicode"),
        ("x" * (4 << 20), "characters: a profile's has at most 4194304"),
    ],
    ids=lambda case: str(case)[:40] if isinstance(case, str | dict) else "",
)
def test_what_could_not_be_read_is_not_written(tmp_path, changes, message):
    if not isinstance(changes, dict) or 1 in changes:  # a value in the record that this version does not know
        changes = {"record": {"a": changes}}
    with pytest.raises(ProfileError, match=message):
        save_profile(profile(**changes), tmp_path / "p.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_length_runs_the_settings_of_the_nearest_bucket_in_log_length():
    """Of two equally near ones those of the longer; never a mixture, which nobody measured."""
    layers = tuple((layer(0.25 * index),) * 2 for index in (1, 2, 3))
    stored = profile(lengths=(1024, 4096, 4100), layers=layers)
    for length, bucket in ((1, 0), (1024, 0), (2047, 0), (2048, 1), (4097, 1), (4098, 2), (1 << 24, 2)):
        assert stored.layer_config(1, length) is layers[bucket][1]


def test_a_file_is_the_old_one_until_the_new_one_is_complete(tmp_path, monkeypatch):
    """For who reads it while it is written, and after a crash: the new content is in a file of its own until then."""
    path = tmp_path / "p.safetensors"
    save_profile(profile(), path)

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patches:
        patches.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="No space"):
            write_atomically(path, b"new")
    assert load_profile(path) == profile()
    with path.open("rb", buffering=0) as reader:
        begun = reader.read(10)
        write_atomically(path, b"new")
        assert begun + reader.read() == DATA
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["p.safetensors"]


@pytest.mark.parametrize(
    ("make", "what"), [(os.mkfifo, "a pipe, a socket or a device"), (os.mkdir, "a folder")], ids=["pipe", "folder"]
)
def test_what_is_no_regular_file_is_refused_and_stays(make, what, tmp_path):
    make(tmp_path / "p")
    (tmp_path / "link").symlink_to("p")
    before = (tmp_path / "p").lstat()
    for path in (tmp_path / "p", tmp_path / "link"):
        with pytest.raises(ConfigError, match=f"{path} is {what}"):
            write_atomically(path, b"new")
    assert (tmp_path / "p").lstat() == before
    assert sorted(os.listdir(tmp_path)) == ["link", "p"]


MIXED_GEOMETRY = Geometry("gemma3_text", 2, 3, 1, 64, (1, 3), (("linear_attention", 1), ("sliding_attention", 1)))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, None),
        ({"architecture": "gemma3"}, "architecture gemma3_text where the profile has gemma3"),
        ({"head_dim": 128}, "head dim 64 where the profile has 128"),
        ({"layer_numbers": ()}, "full attention in layers 1, 3 where the profile has it in all"),
        ({"others": ()}, "layers of other kinds (1 linear_attention, 1 sliding_attention) where the profile has oth"),
    ],
)
def test_another_geometry_is_named_in_words(change, sentence):
    difference = MIXED_GEOMETRY.describe_difference(dataclasses.replace(MIXED_GEOMETRY, **change))
    assert difference == sentence or difference.startswith(sentence)
