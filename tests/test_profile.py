import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from s2o_runtime import profile as profile_module
from s2o_runtime.config import HeadConfig, LayerConfig, TileConfig
from s2o_runtime.errors import ProfileError
from s2o_runtime.gpu import DeviceIdentity
from s2o_runtime.identity import Geometry
from s2o_runtime.profile import METADATA_KEY, Profile, load_profile, save_profile, serialize, write_atomically

GEOMETRY = Geometry("llama", 2, 3, 1, 64)


def layer(tau, segment=256, block_m=128):
    ranked = HeadConfig(tau * 4, segment, representatives=32, tail=True)
    heads = (HeadConfig(tau, segment), ranked, HeadConfig(0.0, segment, "dense"))
    return LayerConfig(heads, TileConfig(block_m, 64, 4, 8, 2), grain=4)


def profile(**changes):
    made = Profile(
        "demo",
        GEOMETRY,
        "f" * 64,
        DeviceIdentity("cuda", "NVIDIA H200", (9, 0), 132, 1 << 37),
        (1024, 4096),
        ((layer(0.25), layer(0.5, 512)), (layer(1.0), layer(2.0, 512))),
        {"budget": {"kind": "mse", "value": 1e-4}, "note": "ü"},
    )
    return dataclasses.replace(made, **changes)


def rewrite(path, change):
    """Change a profile's document behind its back and keep the tensors."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        document = json.loads(file.metadata()[METADATA_KEY])
    document = change(document) or document
    path.write_bytes(save(load(path.read_bytes()), metadata={METADATA_KEY: json.dumps(document)}))


def test_round_trip(tmp_path):
    path = tmp_path / "p.safetensors"
    save_profile(profile(), path)
    assert load_profile(path) == profile()
    assert os.stat(path).st_mode & 0o777 == 0o644


def test_the_same_profile_gives_the_same_bytes_in_another_process(tmp_path):
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_profile;"
        "sys.stdout.buffer.write(test_profile.serialize(test_profile.profile()))"
    )
    folder = os.path.dirname(__file__)
    runs = [subprocess.run([sys.executable, "-c", program, folder], capture_output=True, check=True) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout == serialize(profile())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema=99), "schema 99 is not supported, this version reads schema 2: use a newer version"),
        (lambda d: d.update(schema=1), "schema 1 is not supported, this version reads schema 2: calibrate again"),
        (lambda d: d.pop("model"), "field model is missing"),
        (lambda d: d["model"].update(layers="2"), "field model.layers is a str: expected a int"),
        (lambda d: d["model"].update(query_heads=10**9), "field model.query_heads is 1000000000"),
        (lambda d: d["model"].update(layers=5), r"tensor tau is .* expected torch.float32 \(2, 5, 3\)"),
        (lambda d: d["model"].update(name="other"), "the digest does not match"),
        (lambda d: d["record"].update(note="tampered"), "the digest does not match"),
        (lambda d: d.update(lengths=[]), "lengths is empty"),
        (lambda d: d.update(lengths=[1.5, 2]), "are not integers"),
        (lambda d: d["device"].update(capability=[9]), "field device.capability"),
        (lambda d: d.update(digest=None), "field digest is a NoneType"),
        (lambda d: [d], "its document is a list"),
    ],
)
def test_a_changed_document_is_refused_by_name(tmp_path, change, message):
    path = tmp_path / "p.safetensors"
    save_profile(profile(), path)

    def apply(document):
        changed = change(document)
        return changed if isinstance(changed, list) else None

    rewrite(path, apply)
    with pytest.raises(ProfileError, match=message):
        load_profile(path)


def test_changed_tensors_are_refused(tmp_path):
    path = tmp_path / "p.safetensors"
    save_profile(profile(), path)
    data = bytearray(path.read_bytes())
    tau = torch.tensor([0.25], dtype=torch.float32).numpy().tobytes()
    data[data.index(tau) + 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ProfileError, match="digest does not match"):
        load_profile(path)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("mode", 2, "(0, 1)"),
        ("threshold", 3, "(0, 1, 2)"),
        ("row_reduce", 2, "(0, 1)"),
        ("representatives", 3, "(1, 2, 4, 8, 16, 32, 64)"),
        ("representatives", 0, "(1, 2, 4, 8, 16, 32, 64)"),
        ("tail", 2, "(0, 1)"),
        ("grain", 16, "(1, 2, 4, 8)"),
    ],
)
def test_tensors_that_say_what_there_is_not_are_refused_by_name(tmp_path, monkeypatch, name, value, expected):
    real = profile_module._tensors

    def changed(made):
        tensors = real(made)
        tensors[name].flatten()[0] = value
        return tensors

    monkeypatch.setattr(profile_module, "_tensors", changed)
    path = tmp_path / "p.safetensors"
    save_profile(profile(), path)
    with pytest.raises(ProfileError, match=re.escape(f"tensor {name} holds {value}: expected one of {expected}")):
        load_profile(path)


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


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, 10**6), value=st.integers(0, 255), cut=st.booleans())
def test_damaged_bytes_end_in_profile_errors_only(tmp_path_factory, position, value, cut):
    data = bytearray(serialize(profile()))
    position %= len(data)
    unchanged = not cut and data[position] == value
    data[position] = value
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(data[:position] if cut else data)
    if unchanged:
        assert load_profile(path) == profile()
    else:
        with pytest.raises(ProfileError):
            load_profile(path)


def test_illegal_contents_are_refused_on_writing_too(tmp_path):
    path = tmp_path / "p.safetensors"
    with pytest.raises(ProfileError, match="not ascending"):
        save_profile(profile(lengths=(4096, 1024)), path)
    bad = LayerConfig(layer(0.25).heads[:2])
    with pytest.raises(ProfileError, match="layer 0 has 2 heads: expected 3"):
        save_profile(profile(layers=((bad, bad),) * 2), path)
    assert not path.exists()


def test_thresholds_are_interpolated_in_log_length():
    made = profile()
    assert made.layer_config(0, 1024).heads[0].tau == 0.25
    assert made.layer_config(0, 4096).heads[0].tau == 1.0
    assert made.layer_config(0, 2048).heads[0].tau == pytest.approx(0.5)  # halfway in log length, geometric in tau
    assert made.layer_config(0, 2048).heads[2].mode == "dense"
    assert made.layer_config(0, 100).heads[0].tau == 0.25
    assert made.layer_config(0, 1 << 20).heads[0].tau == 1.0
    assert made.layer_config(0, 2040) == made.layer_config(0, 2050)


@pytest.mark.parametrize(
    "change",
    [{"mode": "dense"}, {"threshold": "share"}, {"representatives": 2}, {"tail": True}],
    ids=lambda change: next(iter(change)),
)
def test_thresholds_of_different_methods_are_not_mixed(change):
    near, far = layer(0.25), layer(1.0)
    other = dataclasses.replace(far, heads=(dataclasses.replace(far.heads[0], **change), *far.heads[1:]))
    mixed = profile(layers=((near, near), (other, far)))
    assert mixed.layer_config(0, 2040).heads[0] == near.heads[0]
    assert mixed.layer_config(0, 2040).heads[1].tau == pytest.approx(2.0)
    coarse = profile(layers=((near, near), (dataclasses.replace(far, grain=1), far)))
    assert coarse.layer_config(0, 2040) == near


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
