import copy
import dataclasses
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from s2o_runtime.config import HeadConfig, LayerConfig, StopRule, TileConfig
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.errors import ConfigError, InputError, ProfileError
from s2o_runtime.files import write_atomically
from s2o_runtime.identity import Geometry, join_fingerprint
from s2o_runtime.profile import Profile, load_profile, save_profile, serialize
from s2o_runtime.profile import file as profile_file
from support.golden_profiles import GOLDEN, ceiling, field_paths, full, given_tokenizer, mixed, path_of
from support.profiles import FORMAT, document_of, file_of

GEOMETRY = Geometry("llama", 2, 3, 1, 64)


def layer(tau, segment=256, block_m=128):
    ranked = HeadConfig(tau * 4, segment, representatives=16, tail="mean")
    heads = (HeadConfig(tau, segment), ranked, HeadConfig(0.0, segment, "dense"))
    return LayerConfig(heads, TileConfig(block_m, 64, 4, 8, 2))


def profile(**changes):
    unchanged = Profile(
        "demo",
        GEOMETRY,
        "f" * 64,
        DeviceIdentity("cuda", "NVIDIA H200", (9, 0), 132, 1 << 37),
        (1024, 4096),
        ((layer(0.25), layer(0.5, 512)), (layer(1.0), layer(2.0, 512))),
        {"budget": {"kind": "mse", "value": 1e-4}, "note": "ü"},
    )
    return dataclasses.replace(unchanged, **changes)


def digested(document, tensors):
    """The bytes of a profile that says this and has not been damaged."""
    try:
        digest = profile_file._digest(document, tensors)
    except (ValueError, RuntimeError):  # not finite; a tensor without dimensions
        digest = "0" * 64
    return file_of(document | {"digest": digest}, tensors)


def unchecked(profile):
    """The bytes of a profile as a program would write them that does not check anything."""
    return digested(DOCUMENT, profile_file._tensors(profile))


DOCUMENT = document_of(serialize(profile()))  # of a profile that nobody changed, as are these tensors
TENSORS = load(serialize(profile()))
DATA = serialize(profile())


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_files_are_read_for_ever(name):
    """Files that were written once: what is in them; the one of the newest schema is written again byte for byte."""
    data = path_of(name).read_bytes()
    profile = load_profile(path_of(name))
    assert profile == GOLDEN[name]()
    assert (serialize(profile) == data) == (not profile.unsupported_heads)


@pytest.mark.parametrize(
    ("name", "values", "unsupported"),
    [("tail", [0, 2, 2], [1, 2]), ("representatives", [1, 32, 4], [1, 2]), ("grain", 2, [0, 1, 2])],
)
def test_heads_that_only_earlier_versions_could_run_are_dense(tmp_path, name, values, unsupported):
    """And written so; a head that was dense already, the last one, is not counted."""
    tensors = TENSORS | {name: TENSORS[name].clone()}
    tensors[name][0, 0] = torch.tensor(values)
    loaded = outcome(digested(DOCUMENT, tensors), tmp_path)
    (first, *others), *buckets = profile().layers
    heads = [
        dataclasses.replace(head, mode="dense", tail="none", representatives=1) if index in unsupported else head
        for index, head in enumerate(first.heads)
    ]
    assert loaded.layers == ((dataclasses.replace(first, heads=tuple(heads)), *others), *buckets)
    assert loaded.unsupported_heads == len(unsupported) - 1
    assert loaded.record == profile().record
    again = outcome(serialize(loaded), tmp_path)
    assert (again, again.unsupported_heads) == (loaded, 0)


def test_the_format_names_every_field_and_tensor_and_no_other():
    rows = {row.removesuffix("[]") for row in re.findall(r"^\| `([^`]+)` \|", FORMAT.read_text("utf-8"), re.MULTILINE)}
    fields = set()
    for golden in (full, given_tokenizer, ceiling):
        fields |= field_paths(document_of(serialize(golden())))
    fields |= field_paths(document_of(serialize(mixed()))) - {"record"}
    fields = {re.sub(r"\.(versions|other_layers)\..*", r".\1", field) for field in fields}
    fields |= {"record.recipe.kv_cache_dtype", "record.recipe.last_rows"}  # where cache or version have it
    identified = replace(full(), fingerprint=join_fingerprint("a", "b", {"hidden_act": "silu"}))
    fields |= {path for path in field_paths(document_of(serialize(identified))) if path.startswith("model.")}
    fields = {re.sub(r"^model\.config\..*", "model.config", field) for field in fields}
    parents = {row for row in rows if any(field.startswith((f"{row}.", f"{row}[]")) for field in fields)}
    assert rows - parents == fields | set(profile_file.TENSORS | profile_file.OPTIONAL_TENSORS)
    for name in profile_file.TILE_FIELDS:
        assert f"`{name}`" in FORMAT.read_text(encoding="utf-8")


def test_round_trip(tmp_path):
    path = tmp_path / "p.safetensors"
    save_profile(profile(), path)
    assert load_profile(path) == profile()
    assert os.stat(path).st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda folder: load_profile(None), "load_profile has a NoneType: expected the path of a profile's file"),
        (lambda folder: load_profile(profile()), "load_profile has a Profile: expected the path"),
        (
            lambda folder: save_profile(folder / "p", profile()),
            "save_profile has a .*Path and a Profile: .* in this order",
        ),
        (lambda folder: save_profile({}, folder / "p"), "save_profile has a dict and a .*Path: expected a Profile"),
        (lambda folder: save_profile(profile(), None), "save_profile has a Profile and a NoneType"),
        (lambda folder: save_profile(profile(), folder / "no" / "p"), "no is no folder: make it first"),
    ],
)
def test_arguments_of_another_kind_are_named(call, message, tmp_path):
    with pytest.raises(InputError, match=message):
        call(tmp_path)
    assert not list(tmp_path.iterdir())


def in_mixed(**changes):
    """A change of a document that makes it one of a model with layers of other kinds, of which it says this."""
    others = {"layer_numbers": [1, 3], "other_layers": {"linear_attention": 1, "sliding_attention": 1}}
    return lambda d: d["model"].update(others | changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema=9), r"schema 9 is of a newer version of S2O .* reads 8: install that"),
        *(
            (lambda d, old=old: d.update(schema=old), rf"schema {old} is of an older version .*: calibrate again")
            for old in range(1, 8)
        ),
        (
            lambda d: d.update(baselines=["pbs:keep=0.9"]),
            r"field baselines is \['pbs:keep=0.9'\]: this version has no heads that other methods compute, calibrate",
        ),
        (lambda d: d.pop("model"), "field model is missing"),
        (lambda d: d["model"].update(layers="2"), "field model.layers is a string: expected an integer"),
        (lambda d: d["model"].update(query_heads=10**9), "field model.query_heads is 1000000000"),
        (lambda d: d["model"].update(layers=5), r"tensor tau is .* expected torch.float32 \(2, 5, 3\)"),
        (lambda d: d["model"].update(kv_heads=2), "field model.kv_heads is 2: expected a divisor of 3 query heads"),
        (lambda d: d["model"].update(layers=1 << 14, query_heads=1 << 14), "make 536870912 heads: at most 1048576"),
        (lambda d: d["device"].update(sm_count=-1), "field device.sm_count is -1: expected 0 to 65536"),
        (lambda d: d["device"].update(memory_bytes=1 << 60), "field device.memory_bytes is 1152921504606846976"),
        (lambda d: d["device"].update(capability=[9]), "field device.capability"),
        (lambda d: d["device"].update(capability=[True, 0]), r"field device.capability is \[True, 0\]: expected two"),
        (lambda d: d["device"].update(capability=[9, 10**4]), "field device.capability"),
        (lambda d: d.update(lengths=[]), "lengths is empty"),
        (lambda d: d.update(lengths=[1.5, 2]), "are not integers"),
        (lambda d: d.update(lengths=[True, 2]), r"lengths \[True, 2\] are not integers"),
        (lambda d: d.update(lengths=list(range(1000))), "lengths has 1000 entries: expected at most 193"),
        (in_mixed(layer_numbers=[1]), r"model.layer_numbers is \[1\]: expected 2 ascending numbers below 4"),
        (in_mixed(layer_numbers=[3, 1]), "expected 2 ascending numbers below 4"),
        (in_mixed(layer_numbers=[1, 4]), "expected 2 ascending numbers below 4"),
        (in_mixed(layer_numbers=[True, 3]), "expected 2 ascending numbers below 4"),
        (in_mixed(layer_numbers=3), "field model.layer_numbers is an integer: expected a list"),
        (in_mixed(other_layers={}), "field model.other_layers is {}: expected numbers of layers by their kinds"),
        (in_mixed(other_layers={"linear_attention": 0}), "expected numbers of layers by their kinds"),
    ],
)
def test_a_document_that_says_what_no_profile_does_is_refused_by_name(tmp_path, change, message):
    """Although its digest is right."""
    document = copy.deepcopy(DOCUMENT)
    change(document)
    assert re.search(message, outcome(digested(document, TENSORS), tmp_path))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("mode", 2, "(0, 1)"),
        ("stop_rule", 1, "(0, 2)"),
        ("row_reduce", 1, "(0,)"),
        ("representatives", 3, "(1, 2, 4, 8, 16, 32, 64)"),
        ("representatives", 0, "(1, 2, 4, 8, 16, 32, 64)"),
        ("tail", 3, "(0, 1, 2)"),
        ("grain", 16, "(1, 2, 4, 8)"),
        ("tile[specialized]", -1, "(0, 1)"),
        ("tile[specialized]", 2, "(0, 1)"),
    ],
)
def test_tensors_that_say_what_there_is_not_are_refused_by_name(tmp_path, monkeypatch, name, value, expected):
    real = profile_file._tensors

    def changed(profile):
        tensors = real(profile)
        if name == "tile[specialized]":
            tensors["tile"][0, 0, profile_file.TILE_FIELDS.index("specialized")] = value
        else:
            tensors[name].flatten()[0] = value
        return tensors

    monkeypatch.setattr(profile_file, "_tensors", changed)
    path = tmp_path / "p.safetensors"
    path.write_bytes(unchecked(profile()))
    for attempt in (load_profile, partial(save_profile, profile())):
        sentence = f"tensor {name} holds {value}: expected one of {expected}, calibrate again"
        with pytest.raises(ProfileError, match=re.escape(sentence)):
            attempt(path)


def test_last_rows_are_a_tensor_only_where_there_are_any(tmp_path):
    (first, second), longer = profile().layers
    rows = profile(layers=((dataclasses.replace(first, last_rows=256), second), longer))
    path = tmp_path / "p.safetensors"
    save_profile(rows, path)
    assert load_profile(path) == rows
    assert load(path.read_bytes())["last_rows"].tolist() == [[256, 0], [0, 0]]
    assert "last_rows" not in TENSORS
    foreign = load(path.read_bytes())
    foreign["last_rows"][0, 0] = 64
    assert "tensor last_rows holds 64: expected one of (0, 128, 256, 512)" in outcome(
        digested(DOCUMENT, foreign), tmp_path
    )


def test_truncated_foreign_and_missing_files(tmp_path):
    path = tmp_path / "p.safetensors"
    data = serialize(profile())
    for length in (0, 4, 100, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(ProfileError, match="damaged or foreign"):
            load_profile(path)
    path.write_bytes(save({"weight": torch.zeros(3)}))
    with pytest.raises(ProfileError, match="not an S2O profile"):
        load_profile(path)
    with pytest.raises(ProfileError, match=r"cannot be read \(No such file or directory\)"):
        load_profile(tmp_path / "missing.safetensors")
    with pytest.raises(ProfileError, match=str(tmp_path)):
        load_profile(tmp_path)
    odd = tmp_path / "{name}.safetensors"
    odd.write_bytes(b"")
    with pytest.raises(ProfileError, match=r"\{name\}\.safetensors is not a readable safetensors file"):
        load_profile(odd)


def outcome(data, folder):
    """What loading bytes ends in: a profile, or the sentence of a ProfileError; anything else is a bug."""
    path = folder / "fuzzed.safetensors"
    path.write_bytes(data)
    try:
        return load_profile(path)
    except ProfileError as error:
        sentence = str(error)
    assert sentence.startswith(str(path))
    assert len(sentence) < 1000
    return sentence.removeprefix(str(path))


places = st.integers(0, len(DATA) - 1) | st.integers(0, 16) | st.integers(0, 10**9).map(lambda n: n % len(DATA))
damages = st.one_of(
    st.tuples(st.just("cut"), places, st.just(b"")),
    st.tuples(st.just("flip"), places, st.binary(min_size=1, max_size=1)),
    st.tuples(st.just("insert"), places, st.binary(min_size=1, max_size=12)),
    st.tuples(st.just("insert"), places, st.sampled_from([b'"', b"{", b"[" * 9, b"9" * 30, b"1e999", b"null", b","])),
    st.tuples(st.just("delete"), places, st.binary(min_size=1, max_size=12)),
)


@settings(max_examples=200, deadline=None)
@given(damage=st.lists(damages, min_size=1, max_size=3))
def test_damaged_bytes_end_in_profile_errors_only(tmp_path_factory, damage):
    data = bytearray(DATA)
    for kind, place, piece in damage:
        if kind == "cut":
            del data[place:]
        elif kind == "insert":
            data[place:place] = piece
        else:
            data[place : place + len(piece)] = piece if kind == "flip" else b""
    loaded = outcome(data, tmp_path_factory.getbasetemp())
    assert isinstance(loaded, str) or loaded == profile()


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 2**15)
    | st.sampled_from([10**30, -(2**63), 2**63, 1 << 24])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\ud800", "\x00", "x" * 5000]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=6,
)
fields = st.sampled_from(
    [(name,) for name in DOCUMENT if name != "digest"]
    + [(outer, name) for outer in ("model", "device", "record") for name in DOCUMENT[outer]]
    + [("lengths", 0), ("device", "capability", 1), ("record", "new"), ("new",)]
)


@settings(max_examples=150, deadline=None)
@given(field=fields, value=json_values, drop=st.booleans())
def test_foreign_values_end_in_profile_errors_that_name_them(tmp_path_factory, field, value, drop):
    """What is not refused is a profile that can be written and read again."""
    document = copy.deepcopy(DOCUMENT)
    *outer, last = field
    holder = document
    for name in outer:
        holder = holder[name]
    if drop and isinstance(holder, dict):
        holder.pop(last, None)
    else:
        holder[last] = value
    loaded = outcome(digested(document, TENSORS), tmp_path_factory.getbasetemp())
    if isinstance(loaded, Profile):
        path = tmp_path_factory.getbasetemp() / "again.safetensors"
        save_profile(loaded, path)
        assert load_profile(path) == loaded
    else:
        known = {*map(str, field), *TENSORS, "kv_heads"}  # sizes are found wrong by the tensors they do not fit
        assert any(name in loaded for name in known), loaded


DEEP = "[" * 100_000 + "]" * 100_000


def size(header):
    """The bytes with which a safetensors file says how long its header is."""
    return header.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (size(1 << 40), "its header is cut off"),
        (size(10 << 20) + bytes(10 << 20), "its header has 10485760 bytes, a profile's at most"),
        (size(2) + b"[]", "its header is no object"),
        (size(2) + b"\xff\xff", "can't decode"),
        (file_of(DOCUMENT, TENSORS | {"x" * 100: torch.zeros(1)}), r"xx.. is not part of a profile: expected \['gra"),
        (
            file_of(DOCUMENT, {name: tensor for name, tensor in TENSORS.items() if name != "tail"}),
            r"tensor 'tail' is missing: expected \['grain'",
        ),
        (file_of(DOCUMENT | {"model": DOCUMENT["model"] | {"name": "other"}}, TENSORS), "the digest does not match"),
        (file_of(DOCUMENT | {"record": DOCUMENT["record"] | {"note": "other"}}, TENSORS), "the digest does not match"),
        (file_of(DOCUMENT | {"digest": None}, TENSORS), "field digest is null"),
        *((file_of(text, TENSORS), message) for text, message in (
            (f'{{"schema":7,"record":{DEEP}}}', "its document is not valid JSON"),
            (f'{{"schema":7,"record":{"[" * 17}{"]" * 17}}}', r"field record\[0\].* is too deep: expected at most 16"),
            ('{"schema":7,"schema":7}', "field 'schema' is given twice"),
            ('{"schema":7,"record":{"a":{"b":1,"b":2}}}', "field 'b' is given twice"),
            (f'{{"schema":{"9" * 5000}}}', "field schema is inf: expected a finite number"),
            ('{"record":{"a":[0,1e999]}}', r"field record.a\[1\] is inf: expected a finite number"),
            ('{"record":{"a":NaN}}', "field record.a is nan: expected a finite number"),
            ('{"schema":9223372036854775808}', "field schema has 64 bits: expected an integer of at most 63"),
            ('{"model":{"name":"\\ud800"}}', r"field model.name is '\\ud800': expected valid Unicode"),
            ('{"\\udfff":1}', r"field '\\udfff' has a name that is no text"),
            (" " * ((4 << 20) + 1), "its document has 4194305 characters: a profile's has at most 4194304"),
            ("", "its document is not valid JSON"),
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
    """What later versions may add without another schema."""
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


def recorded(value):
    """A record with a value that this version does not know."""
    return {"record": {"a": value}}


FEW_HEADS = LayerConfig(layer(0.25).heads[:2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": (4096, 1024)}, "not ascending"),
        ({"geometry": dataclasses.replace(GEOMETRY, kv_heads=2)}, r"field model\.kv_heads is 2: expected a divisor"),
        ({"layers": ((FEW_HEADS, FEW_HEADS),) * 2}, "layer 0 has 2 heads: expected 3"),
        (recorded(float("nan")), "field record.a is nan: expected a finite number"),
        (recorded(10**5000), "field record.a has 16610 bits: expected an integer of at most 63"),
        (recorded(Path("/x")), "field record.a is a PosixPath: expected a JSON value"),
        (recorded({1: 2}), "field record.a.1 has a name that is no text"),
        (recorded("\ud800"), r"field record.a is '\\ud800': expected valid Unicode"),
        (recorded("x" * (4 << 20)), "characters: a profile's has at most 4194304"),
    ],
    ids=lambda case: case[:40] if isinstance(case, str) else next(iter(case)),
)
def test_what_could_not_be_read_is_not_written(tmp_path, changes, message):
    with pytest.raises(ProfileError, match=message):
        save_profile(profile(**changes), tmp_path / "p.safetensors")
    assert not list(tmp_path.iterdir())


def test_thresholds_are_interpolated_in_log_length():
    stored = profile()
    assert stored.layer_config(0, 1024).heads[0].tau == 0.25
    assert stored.layer_config(0, 4096).heads[0].tau == 1.0
    assert stored.layer_config(0, 2048).heads[0].tau == pytest.approx(0.5)  # halfway in log length, geometric in tau
    assert stored.layer_config(0, 2048).heads[2].mode == "dense"
    assert stored.layer_config(0, 100).heads[0].tau == 0.25
    assert stored.layer_config(0, 1 << 20).heads[0].tau == 1.0
    assert stored.layer_config(0, 2040) == stored.layer_config(0, 2050)


@pytest.mark.parametrize(
    "change", [{"representatives": 16}, {"tail": "mean"}, {"segment": 512}], ids=lambda change: next(iter(change))
)
def test_thresholds_of_unlike_heads_are_not_mixed(change):
    """One tau means another error with other settings, so the smaller one is taken: it errs on the careful side."""
    for near_tau, far_tau in ((0.25, 1.0), (1.0, 0.25)):
        near, far = layer(near_tau), layer(far_tau)
        other = dataclasses.replace(far, heads=(dataclasses.replace(far.heads[0], **change), *far.heads[1:]))
        mixed = profile(layers=((near, near), (other, far)))
        assert mixed.layer_config(0, 2040).heads[0] == dataclasses.replace(near.heads[0], tau=0.25)
        assert mixed.layer_config(0, 2040).heads[1].tau == pytest.approx(2.0)


@pytest.mark.parametrize(
    "change", [{"mode": "dense"}, {"stop_rule": StopRule.PAPER}], ids=lambda change: next(iter(change))
)
def test_heads_that_another_bucket_runs_otherwise_keep_their_threshold(change):
    near, far = layer(1.0), layer(0.25)
    other = dataclasses.replace(far, heads=(dataclasses.replace(far.heads[0], **change), *far.heads[1:]))
    assert profile(layers=((near, near), (other, far))).layer_config(0, 2040).heads[0] == near.heads[0]


@pytest.mark.parametrize(
    "change",
    [{"tile": TileConfig(128, 64, 8, 8, 2)}, {"tile": TileConfig(64, 64, 4, 8, 2)}],
    ids=["stride", "height"],
)
def test_buckets_that_check_the_stop_unlike_are_not_mixed(change):
    near, far = layer(0.25), dataclasses.replace(layer(1.0), **change)
    assert profile(layers=((near, near), (far, far))).layer_config(0, 2040) == near
    assert [head.tau for head in profile(layers=((far, far), (near, near))).layer_config(0, 2040).heads[:2]] == [
        0.25,
        1.0,
    ]


def test_a_crash_while_writing_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "p.safetensors"
    save_profile(profile(), path)

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert load_profile(path) == profile()
    assert os.listdir(tmp_path) == ["p.safetensors"]


def test_who_reads_while_a_file_is_written_sees_the_old_one(tmp_path):
    """Also on the way: the new content is in a file of its own until it is complete, and then takes the name."""
    path = tmp_path / "p.safetensors"
    save_profile(profile(), path)
    old = path.read_bytes()
    with path.open("rb", buffering=0) as reader:
        begun = reader.read(10)
        write_atomically(path, b"new")
        assert begun + reader.read() == old
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


def test_a_symbolic_link_stays_one(tmp_path):
    """Also one whose target is not there yet."""
    (tmp_path / "store").mkdir()
    (tmp_path / "link").symlink_to("store/p")
    for data in (b"old", b"new"):
        write_atomically(tmp_path / "link", data)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "store" / "p").read_bytes() == data
    assert os.listdir(tmp_path / "store") == ["p"]


MIXED = Geometry("gemma3_text", 2, 3, 1, 64, (1, 3), (("linear_attention", 1), ("sliding_attention", 1)))


def test_a_model_with_layers_of_other_kinds(tmp_path):
    """The file says which layers its rows are of; that of another model does not mention it."""
    mixed = profile(geometry=MIXED)
    save_profile(mixed, tmp_path / "mixed.safetensors")
    assert load_profile(tmp_path / "mixed.safetensors") == mixed
    model = document_of(serialize(mixed))["model"]
    assert model["layer_numbers"] == [1, 3]
    assert model["other_layers"] == {"linear_attention": 1, "sliding_attention": 1}
    assert not {"layer_numbers", "other_layers"} & DOCUMENT["model"].keys()
    assert [MIXED.layer_number(row) for row in range(2)] == [1, 3]
    assert [GEOMETRY.layer_number(row) for row in range(2)] == [0, 1]
    assert [MIXED.row_of(number) for number in range(4)] == [None, 0, None, 1]
    assert [GEOMETRY.row_of(number) for number in range(-1, 3)] == [None, 0, 1, None]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"architecture": "gemma3"}, "architecture gemma3_text where the profile has gemma3"),
        ({"layers": 30}, "2 layers where the profile has 30"),
        ({"kv_heads": 8}, "1 KV heads where the profile has 8"),
        ({"head_dim": 128}, "head dim 64 where the profile has 128"),
        ({"layer_numbers": (0, 3)}, "full attention in layers 1, 3 where the profile has it in layers 0, 3"),
        ({"layer_numbers": ()}, "full attention in layers 1, 3 where the profile has it in all"),
        (
            {"others": ()},
            "layers of other kinds (1 linear_attention, 1 sliding_attention) where the profile has others (none)",
        ),
    ],
)
def test_another_geometry_is_named_in_words(change, said):
    """To follow "the model has"."""
    assert MIXED.difference(dataclasses.replace(MIXED, **change)) == said
