"""Parameters that come and go layer by layer are the ones the whole model has."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from calibrate.model import weights
from calibrate.model.weights import RandomWeights, Weights, build_skeleton, decide_resident
from s2o_runtime.errors import ModelError
from s2o_runtime.identity import fingerprint
from support.marks import all_but_first
from support.models import ARCHITECTURES, CPU, MODELS, build, save, stream

SLOW = pytest.mark.slow(reason="further architectures")


def random_weights(name, seed, resident):
    model = build_skeleton(MODELS[name], torch.float32, CPU)
    return Weights(model, RandomWeights(model, seed), CPU, resident)


@pytest.fixture(params=all_but_first(ARCHITECTURES, SLOW), scope="module")
def saved(request, tmp_path_factory):
    """The model, and the folder it is in, in several files."""
    folder = save(request.param, tmp_path_factory.mktemp("saved"), max_shard_size="60KB")
    return build(request.param), folder


def test_every_part_is_what_was_saved_and_goes_back_to_meta(saved):
    whole, folder = saved
    loaded = stream(folder, False)
    model, expected = loaded.model, dict(whole.named_parameters(remove_duplicate=False))
    layers = {f"model.layers.{index}": layer for index, layer in enumerate(model.model.layers)}
    beside = {"model.embed_tokens": model.model.embed_tokens, "model.norm": model.model.norm, "lm_head": model.lm_head}
    met = set()
    for prefix, part in (beside | layers).items():
        with loaded.weights.put_on_device(part):
            for name, parameter in part.named_parameters(prefix=prefix):
                assert torch.equal(parameter, expected[name])
                met.add(name)
        assert all(parameter.is_meta for parameter in model.parameters())
    assert met == set(expected)
    with pytest.raises(KeyError), loaded.weights.put_on_device(model.lm_head):
        raise KeyError
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.testing.assert_close(dict(model.named_buffers()), dict(whole.named_buffers()), rtol=0, atol=0)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in whole.named_parameters()]


def test_a_resident_model_is_like_any_other_and_the_fingerprint_needs_no_weights(saved):
    whole, folder = saved
    loaded = stream(folder, True)
    ids = torch.randint(3, 128, (1, 50))
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, whole(ids).logits)
        assert torch.equal(loaded.model.generate(ids, max_new_tokens=4), whole.generate(ids, max_new_tokens=4))
    tied = whole.lm_head.weight is whole.model.embed_tokens.weight
    assert (loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight) == tied
    for dtype in (torch.float32, torch.bfloat16):
        assert stream(folder, False, dtype).fingerprint == fingerprint(copy.deepcopy(whole).to(dtype))


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_random_weights_are_the_same_every_time_and_spread_as_the_architecture_spreads_them(name):
    model = random_weights(name, 0, True).model
    reference = AutoModelForCausalLM.from_config(MODELS[name])
    for (key, mine), theirs in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        assert mine.shape == theirs.shape
        if theirs.std() == 0:
            assert torch.equal(mine, theirs), key
        else:  # 4096 values and more: their deviation is known to 1 / sqrt(2 x 4096) = 1.1 percent, five times that
            assert float(mine.std()) == pytest.approx(float(theirs.std()), rel=0.08), key
            assert abs(float(mine.mean())) < 0.002, key
    streamed, other = (random_weights(name, seed, False) for seed in (0, 1))
    for index in (1, 0, 1):
        layers = [weights.model.model.layers[index] for weights in (streamed, other)]
        with streamed.put_on_device(layers[0]), other.put_on_device(layers[1]):
            first, of_another_seed = (layer.state_dict() for layer in layers)
            held = model.model.layers[index].state_dict()
            assert all(torch.equal(first[key], held[key]) for key in first)
            assert not torch.equal(first["self_attn.q_proj.weight"], of_another_seed["self_attn.q_proj.weight"])
            assert not torch.equal(first["self_attn.k_proj.weight"], first["self_attn.v_proj.weight"])
    with streamed.put_on_device(streamed.model.model.embed_tokens, streamed.model.lm_head):
        tied = torch.equal(streamed.model.lm_head.weight, streamed.model.model.embed_tokens.weight)
        assert tied == MODELS[name].tie_word_embeddings


def test_a_model_stays_if_it_takes_a_quarter_of_the_memory(monkeypatch):
    monkeypatch.setattr(weights.os, "sysconf", {"SC_PHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}.get)
    assert decide_resident(10240, CPU)
    assert not decide_resident(10241, CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (400, 4000))
    assert decide_resident(100, torch.device("cuda"))
    assert not decide_resident(101, torch.device("cuda"))


NAME = "model.layers.1.mlp.up_proj.weight"


def change_tensor(change):
    """Change what the one file of a checkpoint holds; drop the tensor where `change` gives None."""

    def damage(folder):
        held = load_file(folder / weights.SINGLE)
        changed = change(held.pop(NAME))
        save_file(held if changed is None else held | {NAME: changed.contiguous()}, folder / weights.SINGLE)

    return damage


def cut(pattern, size):
    """Cut the last file of this kind off, or take it away."""

    def damage(folder):
        path = sorted(folder.glob(pattern))[-1]
        data = path.read_bytes()
        path.unlink()
        if size:
            path.write_bytes(data[:-size])

    return damage


def write_index(text):
    return lambda folder: (folder / weights.INDEX).write_text(text)


FP8 = torch.float8_e4m3fn
OTHER_SHAPE = rf"tensor {NAME} in .* is \[64, 63\], expected \[64, 64\]"


@pytest.mark.parametrize(
    ("several", "damage", "message"),  # of a checkpoint of several files, or of one
    [
        (False, change_tensor(lambda tensor: None), f"the checkpoint has no tensor {NAME}, which its config.json asks"),
        (False, change_tensor(lambda tensor: tensor[:, 1:]), OTHER_SHAPE),
        (False, change_tensor(lambda tensor: tensor.to(FP8)), f"tensor {NAME} in model.safetensors is of type F8_E4M3"),
        (False, cut("model.s*", 1000), r"model.safetensors cannot be read \(.*\): it is damaged or cut off"),
        (False, cut("model.s*", 0), "the checkpoint has neither model.safetensors nor model.safetensors.index.json"),
        (True, cut("model-*", 100), r"model-0.*.safetensors cannot be read \(.*\): it is damaged or cut off"),
        (True, cut("model-*", 0), "the checkpoint has no file model-0.*, which model.safetensors.index.json names"),
        (True, write_index('{"weight_map": '), ".*model.safetensors.index.json is not an index of safetensors files"),
    ],
)
def test_a_damaged_checkpoint_is_one_sentence(several, damage, message, tmp_path):
    save("llama", tmp_path, **({"max_shard_size": "60KB"} if several else {}))
    damage(tmp_path)
    with pytest.raises(ModelError, match=f"^{message}") as raised:
        stream(tmp_path, False)
    assert "\n" not in str(raised.value)
