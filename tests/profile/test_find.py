"""A profile that nobody named is found by its model and its GPU, in a patched model, under s2o-run and in servers."""

import os
from dataclasses import replace
from unittest.mock import Mock

import httpx
import huggingface_hub
import pytest
import torch

from s2o_runtime import explain, patch, patched, save_profile
from s2o_runtime.call import PLAIN
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.errors import ProfileError
from s2o_runtime.huggingface import hf, run
from s2o_runtime.identity import BASE, CONFIG
from s2o_runtime.profile import find
from s2o_runtime.serving.server import Server
from s2o_runtime.sglang.engine import read_settings as read_sglang_settings
from s2o_runtime.vllm.engine import read_settings
from support.environment import forget, restore_sdpa, under_s2o_run
from support.fake_server import context
from support.models import close, make_profile, new_model, prompt, twin, used_s2o

H200 = DeviceIdentity("cuda", "NVIDIA H200", (9, 0), 132, 150 << 30)
ADVICE = "make one with s2o-calibrate --model MODEL, or name a profile's path"
REVISION = "0123456789" * 4
REFUSED = "; found, S2O_PROFILE=off refuses it)"


@pytest.fixture
def profile(eager):
    return recorded(make_profile(eager, 0.5), "mse", 1.0)


@pytest.fixture
def model(eager, tmp_path):
    """A model that was loaded from a folder."""
    model = twin(eager)
    model.config._name_or_path = str(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    return model


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    """The folder that S2O_PROFILES names, in an empty current folder; the package's catalogue is empty too."""
    for name in ("S2O_PROFILE", "S2O_SETTINGS", "S2O_STARTED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "catalogue"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("S2O_PROFILES", str(tmp_path / "mine"))
    monkeypatch.setattr(find, "CATALOGUE", tmp_path / "catalogue")
    forget()
    yield tmp_path / "mine"
    forget()


def recorded(profile, kind, value, certified=True):
    """The profile with a budget, and with a certificate."""
    certificate = {"certificate": {"lengths": [{"length": 100, "prompts": 2}]}} if certified else {}
    return replace(profile, record={"budget": {"kind": kind, "value": value}, **certificate})


def write(profile, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_profile(profile, path)
    return path


def taken(caplog):
    """Return what the log says was taken: exactly one line."""
    (line,) = (message for message in caplog.messages if message.startswith("S2O takes the profile "))
    return line.removeprefix("S2O takes the profile ")


FOLDERS = ["mine", "mine/llama/cpu", "model/s2o", "model/s2o/cpu", "profiles/llama/cpu", "catalogue/llama/cpu"]


@pytest.mark.parametrize("folder", FOLDERS)
@torch.no_grad()
def test_a_patched_model_takes_the_profile_of_its_weights_and_gpu(folder, model, profile, tmp_path, info_log):
    path = write(profile, tmp_path / folder / "p.safetensors")
    patch(model)
    assert taken(info_log) == f"{path} of tiny (certified, mse 1{REFUSED}"
    model(prompt())
    assert used_s2o(model)
    with patched(model):
        assert explain(model) == []


def test_the_catalogue_of_the_package_holds_the_shipped_profiles(monkeypatch):
    monkeypatch.undo()
    shipped = [found for found in find.find_profiles() if find.CATALOGUE.resolve() in found.path.parents]
    assert {found.profile.model_name for found in shipped} >= {"demo"}
    assert {found.profile.device.kind for found in shipped} == {"cpu", "cuda"}


def test_of_several_the_folder_the_certificate_the_budget_and_the_length_decide(profile, model, tmp_path, info_log):
    longer = replace(profile, lengths=(100, 16384))
    in_order = {
        "mine/k": recorded(profile, "kl", 1e-9),
        "mine/b": recorded(profile, "rel_mse", 1e-3),
        "mine/a": recorded(profile, "rel_mse", 1e-2),
        "mine/y": recorded(longer, "mse", 1e-4),
        "mine/x": recorded(profile, "mse", 1e-4),
        "mine/1": recorded(profile, "rel_mse", 1e-6, certified=False),
        "mine/2": replace(profile, record={}),
        "mine/3": replace(profile, record={"budget": {"kind": "mse"}}),
        "model/s2o/a": recorded(profile, "rel_mse", 1e-1),
        "profiles/a": recorded(profile, "rel_mse", 1e-9),
        "catalogue/a": recorded(profile, "rel_mse", 1e-9),
    }
    for name, stored in in_order.items():
        write(stored, tmp_path / f"{name}.safetensors")
    candidates = find.find_profiles(tmp_path / "model")
    names = [candidate.path.relative_to(tmp_path).with_suffix("").as_posix() for candidate in candidates]
    assert dict(zip(names, (candidate.profile for candidate in candidates), strict=True)) == in_order
    assert names == list(in_order)
    assert [str(candidate).partition(" of ")[2] for candidate in candidates[5:8]] == [
        f"tiny (not certified{budget}{REFUSED}" for budget in (", rel_mse 1e-06", "", "")
    ]
    patch(model)
    assert "k.safetensors of tiny (certified, kl 1e-09;" in taken(info_log)


def test_a_file_that_is_no_profile_is_left_out_with_a_line(model, profile, mine, info_log):
    (mine / "a.safetensors").write_bytes(b"\x00" * 9)
    with (mine / "b.safetensors").open("wb") as weights:
        weights.truncate(find.load_profile.__globals__["MAX_BYTES"] + 1)  # a model's, not read
    write(profile, mine / "c.safetensors")
    patch(model)
    assert "c.safetensors" in taken(info_log)
    said = [record.getMessage() for record in info_log.records if record.levelname == "WARNING"]
    assert ["left out of the search for a profile: " in line for line in said] == [True, True]
    assert "a.safetensors: its contents cannot be read" in said[0]
    assert "b.safetensors is larger than" in said[1]


def test_a_hub_ids_profile_is_found_beside_its_snapshot_and_never_downloaded(model, profile, tmp_path, monkeypatch):
    """Of the revision that the model was loaded from; a model without a name is not of the current folder."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(httpx.Client, "send", Mock(side_effect=AssertionError("it asked the Hub")))
    snapshots = tmp_path / "hub" / "models--org--model" / "snapshots"
    path = write(profile, snapshots / REVISION / "s2o" / "p.safetensors")
    other = write(profile, snapshots / REVISION[::-1] / "beside-weights.safetensors").parent
    write(profile, tmp_path / "s2o" / "p.safetensors")
    sources = {("org/model", REVISION): path.parents[1], ("org/model", other.name): other}
    for name, revision in (*sources, ("org/other", None), ("", None)):
        model.config._name_or_path, model.config._commit_hash = name, revision
        folder = find.find_source_folder(model.config)
        assert folder == sources.get((name, revision))
        assert [found.path for found in find.find_profiles(folder)] == [path] * (revision == REVISION)


def test_a_profile_in_the_models_folder_whose_config_is_unknown_is_left_out(model, profile, mine, tmp_path, info_log):
    profile = replace(profile, fingerprint=profile.fingerprint.partition(CONFIG)[0])
    write(profile, tmp_path / "model" / "s2o" / "p.safetensors")
    with pytest.raises(ProfileError, match="no profile is of a model like this one"):
        patch(model)
    assert "s2o/p.safetensors: the profile of tiny lacks the values of config.json" in info_log.text
    write(profile, mine / "p.safetensors")
    patch(model)


def test_an_argument_then_the_environment_names_a_profile_or_none(model, profile, tmp_path, monkeypatch):
    named, given = (write(profile, tmp_path / f"{name}.safetensors") for name in ("named", "given"))
    write(profile, tmp_path / "model" / "s2o" / "own.safetensors")
    loaded = []
    monkeypatch.setattr(hf, "load_profile", lambda path: loaded.append(str(path)) or profile)
    monkeypatch.setenv("S2O_PROFILE", str(named))
    patch(model)
    patch(model, given)
    assert loaded == [str(named), str(given)]
    monkeypatch.setenv("S2O_PROFILE", "off")
    for name in (None, "off"):
        with pytest.raises(ProfileError, match="is 'off', so none is looked for: name one, or unset S2O_PROFILE"):
            patch(model, name)
    server = Server(read_settings({}), context(model.config, checkpoint=tmp_path / "model"))
    assert "the profile is 'off'" in server.obstacle
    monkeypatch.setenv("S2O_STARTED", "1")
    forget()
    assert run.find_obstacle(model.config) == "S2O_PROFILE is 'off', which refuses every profile"


MISFITS = {  # how a profile is changed, and what is said then
    "none": (None, "no profile is of a model like this one (llama, 2 layers, 4 query heads, 2 KV heads, head dim 64)"),
    "another model": (
        lambda profile: replace(profile, geometry=replace(profile.geometry, architecture="qwen2")),
        "no profile is of a model like this one",
    ),
    "another gpu": (
        lambda profile: replace(profile, device=H200),
        "it is for NVIDIA H200 (sm_90, 132 SMs)): run s2o-profile retile /",
    ),
    "other weights": (
        lambda profile: replace(profile, fingerprint=f"0{profile.fingerprint}".replace(BASE, f"{BASE}0")),
        "the weights are not those of tiny",
    ),
}
OF_SERVERS = MISFITS | {
    "quantised": (lambda profile: profile, "weights not compared: their types differ"),
    "unsupported": (lambda profile: profile, "an encoder with a decoder, expected a decoder alone"),
}


@pytest.fixture
def misfit(request, profile, tmp_path):
    """Return what is said of a misfit, whose profile, in the model's own folder, is the only one that there is."""
    change, sentence = OF_SERVERS[request.param]
    if change is not None:
        write(change(profile), tmp_path / "model" / "s2o" / "p.safetensors")
    forget()
    return sentence


@pytest.mark.parametrize("misfit", MISFITS, indirect=True)
def test_where_none_fits_the_sentence_says_why_and_what_makes_one(misfit, model):
    with pytest.raises(ProfileError) as failure:
        patch(model)
    assert misfit in str(failure.value)
    assert str(failure.value).endswith(ADVICE.replace("MODEL", model.config._name_or_path))
    assert model.config._attn_implementation == "sdpa"


@pytest.fixture
def started(monkeypatch):
    """A process of s2o-run without a profile."""
    monkeypatch.setenv("S2O_STARTED", "1")
    with under_s2o_run():
        yield


@torch.no_grad()
def test_each_model_of_a_program_gets_its_own(model, tmp_path, mine, started, info_log):
    other = new_model("qwen2")
    paths = [
        write(recorded(make_profile(each, 0.5), "mse", 1.0), folder / "p.safetensors")
        for folder, each in ((tmp_path / "model" / "s2o", model), (mine, other))
    ]
    forget()
    for each, path in zip((model, other), paths, strict=True):
        info_log.clear()
        for _ in range(2):
            each(prompt())
        assert taken(info_log).startswith(str(path))
        assert used_s2o(each)


@pytest.mark.parametrize("misfit", MISFITS, indirect=True)
@torch.no_grad()
def test_a_model_of_a_program_that_none_fits_stays_dense_and_says_so_once(misfit, model, caplog, started):
    ids = prompt()
    dense = model(ids).logits
    restore_sdpa()
    close(model(ids).logits, dense)
    (line,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert misfit in line
    assert line.endswith(f"{ADVICE.replace('MODEL', model.config._name_or_path)}; it stays dense")


def test_s2o_run_hands_the_folders_on(monkeypatch, tmp_path, mine):
    """The program may change its folder before it runs a model."""
    (tmp_path / "profiles").mkdir()
    monkeypatch.setenv("S2O_PROFILES", "mine")
    environments = []
    monkeypatch.setattr(os, "execvpe", lambda command, arguments, environment: environments.append(environment))
    run.main(["python"])
    (environment,) = environments
    assert (environment["S2O_PROFILES"], "S2O_PROFILE" in environment) == (str(mine), False)
    for name in ("S2O_PROFILES", "S2O_STARTED_IN"):
        monkeypatch.setenv(name, environment[name])
    monkeypatch.chdir("/")
    assert find.list_folders() == [mine, tmp_path / "profiles", tmp_path / "catalogue"]


SERVERS = pytest.mark.parametrize("settings", [lambda: read_settings({}), read_sglang_settings], ids=["vllm", "sglang"])


@SERVERS
def test_a_server_takes_the_profile_of_the_model_that_it_serves(settings, model, profile, tmp_path, info_log):
    path = write(profile, tmp_path / "model" / "s2o" / "cpu" / "p.safetensors")
    server = Server(settings(), context(model.config, checkpoint=tmp_path / "model"))
    assert (server.obstacle, server.fit.profile) == (None, profile)
    (line,) = (message for message in info_log.messages if str(path) in message)
    assert f"in vLLM 0.32.0: profile {path} of tiny (certified, mse 1{REFUSED}, 2 of 2 layers sparse from 100 " in line
    assert set(server.counters.drift) == {0, 1}


@SERVERS
@pytest.mark.parametrize("misfit", OF_SERVERS, indirect=True)
def test_a_server_for_which_none_fits_is_dense_with_one_line(misfit, settings, model, tmp_path, info_log):
    if "types differ" in misfit:
        model.config.quantization_config = {}
    if "encoder" in misfit:
        model.config.is_encoder_decoder = True
    server = Server(settings(), context(model.config, checkpoint=tmp_path / "model", decode_queries=3))
    server.reserve(torch.zeros(4, 4, 64), PLAIN)
    (line,) = info_log.messages
    assert "in vLLM 0.32.0: all rows go to STOCK: " in line
    assert misfit in line
    assert "encoder" in misfit or line.endswith(ADVICE.replace("MODEL", model.config._name_or_path))
    assert server.obstacle == server.fit.obstacle == server.fit.find_layer(0, 4, 2, 64)
    assert server.fit.min_queries == 4
