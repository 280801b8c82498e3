"""Parameters that come and go layer by layer are the ones the whole model has."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from calibrate.model import weights
from calibrate.model.models import DEMO_FOLDER, load
from calibrate.model.weights import RandomWeights, Weights, skeleton, stays_resident
from s2o_runtime.errors import ModelError
from s2o_runtime.identity import fingerprint
from support.marks import all_but_first
from support.models import ARCHITECTURES, CPU, MODELS, build, save, stream

SLOW = pytest.mark.slow(reason="further architectures")


def random_weights(name, seed, resident):
    model = skeleton(MODELS[name], torch.float32, CPU)
    return Weights(model, RandomWeights(model, seed), CPU, resident)


@pytest.fixture(params=[{}, {"max_shard_size": "60KB"}], ids=["single", "sharded"], scope="module")
def shards(request):
    return request.param


@pytest.fixture(params=all_but_first(ARCHITECTURES, SLOW), scope="module")
def saved(request, shards, tmp_path_factory):
    """The model, and the folder it is in."""
    folder = save(request.param, tmp_path_factory.mktemp("saved"), **shards)
    assert (folder / weights.INDEX).is_file() == bool(shards)
    return build(request.param), folder


def test_every_part_is_what_was_saved_and_goes_back_to_meta(saved):
    whole, folder = saved
    loaded = stream(folder, False)
    expected = dict(whole.named_parameters(remove_duplicate=False))
    model = loaded.model
    parts = {
        "model.embed_tokens.": model.model.embed_tokens,
        "model.norm.": model.model.norm,
        "lm_head.": model.lm_head,
    }
    parts |= {f"model.layers.{index}.": layer for index, layer in enumerate(model.model.layers)}
    met = set()
    for prefix, part in parts.items():
        with loaded.weights.on_device(part):
            for name, each in part.named_parameters(prefix=prefix[:-1]):
                assert torch.equal(each, expected[name])
                met.add(name)
        assert all(each.is_meta for each in model.parameters())
    assert met == set(expected)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in whole.named_parameters()]


def test_a_resident_model_is_like_any_other(saved):
    whole, folder = saved
    loaded = stream(folder, True)
    ids = torch.randint(3, 128, (1, 50))
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, whole(ids).logits)
        assert torch.equal(loaded.model.generate(ids, max_new_tokens=4), whole.generate(ids, max_new_tokens=4))
    tied = whole.lm_head.weight is whole.model.embed_tokens.weight
    assert (loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight) == tied


def test_buffers_are_those_of_the_whole_model(saved):
    whole, folder = saved
    mine, theirs = (dict(model.named_buffers()) for model in (stream(folder, False).model, whole))
    assert sorted(mine) == sorted(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_fingerprint_needs_no_weights(saved, dtype):
    whole, folder = saved
    assert stream(folder, False, dtype).fingerprint == fingerprint(copy.deepcopy(whole).to(dtype))


def test_the_demo_is_still_the_same_model():
    """Its fingerprint is in published profiles."""
    loaded = load("demo", "cpu", resident=False)
    reference = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32)
    assert loaded.fingerprint == fingerprint(reference) == load("demo", "cpu").fingerprint


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_weights_are_the_same_every_time(name):
    streamed, again, resident = (random_weights(name, 3, resident) for resident in (False, False, True))
    other = random_weights(name, 4, False)
    for index in (1, 0, 1):
        layers = [each.model.model.layers[index] for each in (streamed, again, resident, other)]
        with streamed.on_device(layers[0]), again.on_device(layers[1]), other.on_device(layers[3]):
            states = [layer.state_dict() for layer in layers]
        for key in states[0]:
            assert torch.equal(states[0][key], states[1][key])
            assert torch.equal(states[0][key], states[2][key])
        key = "self_attn.q_proj.weight"
        assert not torch.equal(states[0][key], states[3][key])
        assert not torch.equal(states[0][key], states[0]["self_attn.o_proj.weight"].T)
    with streamed.on_device(streamed.model.model.embed_tokens, streamed.model.lm_head):
        tied = torch.equal(streamed.model.lm_head.weight, streamed.model.model.embed_tokens.weight)
        assert tied == MODELS[name].tie_word_embeddings


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_weights_are_spread_as_the_architecture_spreads_them(name):
    model = random_weights(name, 0, True).model
    reference = AutoModelForCausalLM.from_config(MODELS[name])
    for (key, mine), theirs in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        assert mine.shape == theirs.shape
        if theirs.std() == 0:
            assert torch.equal(mine, theirs), key
        else:  # 4096 values and more: their deviation is known to 1 / sqrt(2 x 4096) = 1.1 percent, five times that
            assert float(mine.std()) == pytest.approx(float(theirs.std()), rel=0.08), key
            assert abs(float(mine.mean())) < 0.002, key


def test_random_weights_leave_the_random_numbers_alone():
    before = torch.get_rng_state()
    made = random_weights("llama", 0, False)
    state = torch.get_rng_state()
    with made.on_device(made.model.model.layers[0]):
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(before, state)


def test_random_fingerprints_name_seed_and_sizes():
    fingerprints = {random_weights(name, seed, False).fingerprint for name in ARCHITECTURES for seed in (0, 1)}
    assert len(fingerprints) == 6
    assert random_weights("llama", 7, False).fingerprint == random_weights("llama", 7, True).fingerprint
    assert random_weights("llama", 7, False).fingerprint.startswith("random-7-")


def test_parameters_go_back_even_after_an_error(tmp_path):
    loaded = stream(save("llama", tmp_path), False)
    layer = loaded.model.model.layers[0]
    with pytest.raises(KeyError), loaded.weights.on_device(layer):
        raise KeyError
    assert all(each.is_meta for each in layer.parameters())


def test_a_model_stays_if_it_takes_a_quarter_of_the_memory(monkeypatch):
    monkeypatch.setattr(weights.os, "sysconf", {"SC_PHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}.get)
    assert stays_resident(10240, CPU)
    assert not stays_resident(10241, CPU)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (400, 4000))
    assert stays_resident(100, torch.device("cuda"))
    assert not stays_resident(101, torch.device("cuda"))


NAME = "model.layers.1.mlp.up_proj.weight"


def without(folder):
    tensors = load_file(folder / weights.SINGLE)
    del tensors[NAME]
    save_file(tensors, folder / weights.SINGLE)


def narrower(folder):
    tensors = load_file(folder / weights.SINGLE)
    save_file(tensors | {NAME: tensors[NAME][:, 1:].clone()}, folder / weights.SINGLE)


def quantised(folder):
    tensors = load_file(folder / weights.SINGLE)
    save_file(tensors | {NAME: tensors[NAME].to(torch.float8_e4m3fn)}, folder / weights.SINGLE)


def cut_off(folder):
    path = folder / weights.SINGLE
    path.write_bytes(path.read_bytes()[:-1000])


def empty(folder):
    (folder / weights.SINGLE).unlink()


def shard_cut_off(folder):
    path = sorted(folder.glob("model-*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-100])


def shard_gone(folder):
    sorted(folder.glob("model-*.safetensors"))[-1].unlink()


def index_of_another(folder):
    index = json.loads((folder / weights.INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"][NAME] = next(file for file in files if file != index["weight_map"][NAME])
    (folder / weights.INDEX).write_text(json.dumps(index))


def index_cut_off(folder):
    (folder / weights.INDEX).write_text('{"weight_map": ')


def index_of_nothing(folder):
    (folder / weights.INDEX).write_text('{"metadata": {}}')


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "streamed"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without, f"the checkpoint has no tensor {NAME}, which its config.json asks for"),
        (narrower, rf"tensor {NAME} in model.safetensors is \[64, 63\], expected \[64, 64\]"),
        (quantised, f"tensor {NAME} in model.safetensors is of type F8_E4M3, expected one of F64, F32"),
        (cut_off, r"model.safetensors cannot be read \(.*\): it is damaged or cut off"),
        (empty, "the checkpoint has neither model.safetensors nor model.safetensors.index.json"),
        (shard_cut_off, r"model-0.*.safetensors cannot be read \(.*\): it is damaged or cut off"),
        (shard_gone, "the checkpoint has no file model-0.*, which model.safetensors.index.json names"),
        (index_of_another, rf"model-0.*.safetensors cannot be read \(.*{NAME}"),
        (index_cut_off, "model.safetensors.index.json is not an index of safetensors files"),
        (index_of_nothing, r"is not an index of safetensors files \('weight_map'\)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_damaged_checkpoint_is_one_sentence(tmp_path, damage, message, resident):
    sharded = damage.__name__.startswith(("shard", "index"))
    save("llama", tmp_path, **({"max_shard_size": "60KB"} if sharded else {}))
    damage(tmp_path)
    with pytest.raises(ModelError, match=message) as raised:
        stream(tmp_path, resident)
    assert "\n" not in str(raised.value)
