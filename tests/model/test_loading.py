"""Models that do not go through the device layer by layer: loaded by transformers as a whole, or in memory already."""

import json
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from calibrate import calibrate
from calibrate.commands.profile import main as profile_command
from calibrate.model import layers, models
from calibrate.model.layers import LayerwiseForward, begin, with_attention
from calibrate.model.logits import put_logits_on_device
from calibrate.model.models import from_memory, load, load_config, load_tokenizer
from calibrate.model.weights import InMemory, get_model_class
from s2o_runtime import load_profile, patch
from s2o_runtime.config import LayerConfig
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.errors import ConfigError, ModelError, ProfileError, ResourceError
from s2o_runtime.identity import fingerprint, geometry
from s2o_runtime.profile import Profile
from s2o_runtime.serving.fit import check_model
from support.architectures import CASES
from support.marks import all_but_first
from support.models import CONFIGS, build
from support.tiny import QUICKEST, save_tiny, tiny_tokenizer

PROMPTS = [torch.randint(8, 120, (90,), generator=torch.Generator().manual_seed(1))]
RENAMED = (  # models with images or experts, whose checkpoints name or part weights otherwise than transformers does
    "llama4", "qwen2-moe", "qwen2.5-vl", "qwen3-moe", "qwen3-next", "qwen3-vl", "mistral3", "mixtral", "gemma3-vision",
    "gpt-oss", "deepseek-v3", "glm4-moe",
)  # fmt: skip
PLAIN = pytest.mark.slow(reason="text without experts: stored as in llama")
STREAMED = ("gemma3", "lfm2", "llama4", "cohere2", "granite")  # with layers of several kinds, or scaled logits


def saved(name, folder):
    """An architecture's tiny model, and the folder that holds it with a tokenizer."""
    config = CASES[name].config
    torch.manual_seed(2)
    model = get_model_class(config).from_config(config).eval()
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", STREAMED)
@torch.no_grad()
def test_a_model_streams_as_it_runs_whole(name, tmp_path):
    """Each layer gets the masks and positions of its own kind, and the logits are those of the whole model."""
    model = saved(name, tmp_path)
    streamed = load(str(tmp_path), "cpu", resident=False)
    held = from_memory(model, streamed.tokenizer)
    assert not streamed.weights.resident
    assert streamed.fingerprint == held.fingerprint == fingerprint(model)
    assert streamed.geometry.layers == (2 if name == "granite" else 1)
    captured = (layers.capture_layers(loaded, PROMPTS) for loaded in (streamed, held))
    for (mine,), (theirs,) in zip(*captured, strict=True):
        assert mine.layer == theirs.layer
        torch.testing.assert_close((mine.q, mine.k, mine.v), (theirs.q, theirs.k, theirs.v), rtol=1e-4, atol=1e-5)
    with with_attention(streamed.model, "eager"):
        forward = LayerwiseForward(streamed, begin(streamed, PROMPTS))
        for _ in forward.layers:
            forward.move()
        with put_logits_on_device(streamed) as logits:
            pieces = [logits(rows) for rows in forward.streams[0].hidden.split(40, 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), model(PROMPTS[0][None]).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow(reason="two calibrations")
def test_a_model_in_memory_is_calibrated_as_its_checkpoint_is(tmp_path):
    """The same weights give the same profile but for its name; the model keeps its attention."""
    folder = save_tiny(tmp_path / "tiny")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    options = QUICKEST | {"budget_rel_mse": 1e-2}
    named = calibrate(str(folder), progress=False, out=tmp_path / "a" / "p.safetensors", device="cpu", **options)
    held = calibrate(model, tiny_tokenizer(), progress=False, out=tmp_path / "b" / "p.safetensors", **options)
    assert held.written
    assert held.profile.fingerprint == named.profile.fingerprint
    assert held.profile.layers == named.profile.layers
    assert model.config._attn_implementation == "sdpa"
    patch(model, load_profile(tmp_path / "b" / "p.safetensors"), strict=True)


def test_buffers_that_hold_weights_are_in_the_fingerprint():
    """Quantised weights are kept in integer buffers; other buffers do not count."""
    model = build("llama")
    before = fingerprint(model)
    layer = model.model.layers[0].mlp
    layer.register_buffer("scratch", torch.ones(3), persistent=False)
    assert fingerprint(model) == before
    layer.register_buffer("qweight", torch.arange(12, dtype=torch.int32))
    packed = fingerprint(model)
    assert packed != before
    layer.qweight[3] += 100
    assert fingerprint(model) != packed


def test_adapters(tmp_path):
    """Merged or not: both are calibrated, and are different models."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    adapted = peft.get_peft_model(build("llama"), peft.LoraConfig(target_modules=["q_proj", "v_proj"])).eval()
    torch.nn.init.normal_(adapted.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight)
    out = tmp_path / "p.safetensors"
    result = calibrate(adapted, tiny_tokenizer(), progress=False, out=out, budget_rel_mse=1e-2, **QUICKEST)
    assert result.profile.geometry == geometry(CONFIGS["llama"])
    patch(adapted, out, strict=True)
    assert from_memory(adapted.merge_and_unload(), tiny_tokenizer()).fingerprint != result.profile.fingerprint


VOCABULARY = {"▁people": 40, "Ġsystem": 41}


@pytest.mark.parametrize(
    ("words", "adds_bos", "file_adds_bos", "wrong"),
    [
        ({"people": 40, "system": 41}, True, True, None),
        ({"people": 40, "system": 41}, False, None, None),
        ({"people": 40}, True, True, "where the file has token 41 for the last word"),
        ({"people": 41, "system": 41}, True, True, r"the tokens [2, 41] of 'a people', where the file has token 40"),
        ({"people": 40, "system": 41}, False, True, "it puts no BOS before a text"),
        ({"people": 40, "system": 41}, True, False, "it puts a BOS before a text"),
    ],
)
def test_a_tokenizer_is_compared_with_the_vocabulary_of_a_gguf_file(words, adds_bos, file_adds_bos, wrong):
    """One that knows some words as one token and spells the others."""

    def read(text, add_special_tokens=True):
        begin = [1] if add_special_tokens and adds_bos else []
        return SimpleNamespace(input_ids=[*begin, 2, *(words.get(word, 3) for word in text.split(" ")[1:])])

    reader = Mock(side_effect=read, bos_token_id=1)
    problem = models.compare_tokens(reader, VOCABULARY, file_adds_bos)
    assert problem is wrong is None or wrong in problem


def test_a_gguf_file_needs_packages(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "find_spec", lambda package: None)
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ResourceError, match=r"gguf and accelerate, .* pip install '.*\[gguf\]'"):
        load_config(str(tmp_path / "m.gguf"))


def test_a_gguf_file(tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    model = build("llama")
    path = tmp_path / "tiny.gguf"
    write_gguf(gguf, model, path)
    loaded = load(str(path), "cpu")
    assert isinstance(loaded.weights, InMemory)
    ids = PROMPTS[0][None]
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, rtol=1e-3, atol=1e-3)
    assert json.loads(loaded.tokenizer.backend_tokenizer.to_str())["model"]["type"] in ("BPE", "Unigram")
    demo = load_tokenizer("demo")
    assert load_tokenizer(str(path), tokenizer="demo").get_vocab() == demo.get_vocab()
    write_gguf(gguf, model, wrong := tmp_path / "wrong.gguf", adds_bos=demo("a").input_ids[0] != demo.bos_token_id)
    with pytest.raises(ModelError, match=r"is not the file's: it puts .* BOS before a text.*; give --tokenizer"):
        load_tokenizer(str(wrong), tokenizer="demo")


def write_gguf(gguf, model, path, adds_bos=None):
    """A Llama of `support.models` in llama.cpp's format, whose queries and keys have another order of dimensions."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{code:02X}>" for code in range(32, 32 + config.vocab_size - 3))]
    entries = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads, "head_count_kv": config.num_key_value_heads,
        "key_length": config.head_dim, "value_length": config.head_dim, "rope_dimension_count": config.head_dim,
        "rope_freq_base": config.rope_parameters["rope_theta"], "layer_norm_rms_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size, "tokenizer_model": "llama", "token_list": tokens,
        "token_scores": [0.0] * len(tokens), "token_types": [2, 3, 3, *([6] * (len(tokens) - 3))],
        "bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0,
    }  # fmt: skip
    for name, value in (entries | ({} if adds_bos is None else {"add_bos_token": adds_bos})).items():
        getattr(writer, f"add_{name}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, parameter in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        value = parameter.float()
        if heads:
            value = value.reshape(heads, 2, -1, value.shape[1]).transpose(1, 2).reshape(value.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_a_profile_is_verified_with_code_of_the_model_if_it_is_trusted(tmp_path, capsys, monkeypatch):
    """The profile's own recipe has no word on trust: a profile may be another's."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    own_model, out = save_tiny(tmp_path / "own_model"), tmp_path / "p.safetensors"
    (own_model / "own.py").write_text(OWN_CODE)
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    config = json.loads((own_model / "config.json").read_text()) | {"model_type": "own", "auto_map": classes}
    (own_model / "config.json").write_text(json.dumps(config))
    options = QUICKEST | {"num_certify": 3, "budget_rel_mse": 0.5, "worst_rows": 0, "hide_needles": False}
    calibrate(str(own_model), progress=False, out=out, device="cpu", trust_remote_code=True, **options)
    assert load_profile(out).record["recipe"]["trust_remote_code"] is True
    capsys.readouterr()
    for prompts, shown in (([], "proven here"), (["--seed", "5"], "fresh prompts")):
        command = ["verify", str(out), "--model", str(own_model), "--device", "cpu", "--quiet", *prompts]
        assert profile_command(command) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert "comes with code of its own, which is not run: give --trust-remote-code" in line
        assert profile_command([*command, "--trust-remote-code"]) in (0, 3)
        assert shown in capsys.readouterr().out


@pytest.mark.parametrize("name", all_but_first(dict.fromkeys(("llama", *RENAMED, *CASES)), PLAIN, 1 + len(RENAMED)))
def test_a_server_knows_a_models_weights_in_its_checkpoint(name, tmp_path):
    """Whose files may name and part them otherwise than transformers does: right ones are known, wrong ones refused."""
    torch.manual_seed(1)
    config = CASES[name].config
    model = get_model_class(config).from_config(config).eval()
    for weights in model.parameters():  # so that matrices of experts that change places show
        torch.nn.init.normal_(weights, std=0.25)
    model.save_pretrained(tmp_path)
    shape, device = geometry(config), DeviceIdentity("cpu", "cpu")
    layers = ((LayerConfig.uniform(shape.query_heads),) * shape.layers,) * 2
    profile = Profile("tiny", shape, fingerprint(model), device, (32, 8192), layers)
    assert check_model(profile, config, tmp_path) == "weights compared"
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    with pytest.raises(ProfileError, match="the weights are not those of tiny"):
        check_model(replace(profile, fingerprint=fingerprint(model)), config, tmp_path)


def test_weights_in_pickles_are_loaded_whole(tmp_path):
    save_tiny(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    loaded = load(str(tmp_path), "cpu")
    assert isinstance(loaded.weights, InMemory)
    assert loaded.fingerprint == fingerprint(model)


def test_a_model_in_memory_that_will_not_do_is_refused(tmp_path):
    model, tokenizer, out = build("llama"), tiny_tokenizer(), tmp_path / "p.safetensors"
    of_images = Mock(spec=["__call__"], side_effect=ValueError("no image"))  # a processor without a tokenizer
    for arguments, options, error, message in (
        ((model,), {}, ModelError, "the tokenizer of LlamaForCausalLM is missing: give it beside the model"),
        ((model, "demo"), {}, ModelError, "LlamaForCausalLM cannot be used: str is no tokenizer; give"),
        ((model, of_images), {}, ModelError, "cannot be used: Mock reads no text; give the model's own"),
        ((model, tokenizer), {"device": "cpu"}, ConfigError, "got a model in memory and device, which it has already"),
        (("demo", tokenizer), {}, ConfigError, "got a tokenizer and a model by name: give the tokenizer's folder"),
        ((torch.nn.Linear(2, 2), tokenizer), {}, ModelError, "Linear is no transformers model"),
        ((build("llama").train(), tokenizer), {}, ModelError, "the model is in training mode"),
    ):
        with pytest.raises(error, match=message):
            calibrate(*arguments, out=out, **options)
    model.model.layers[1].mlp.to("meta")
    with pytest.raises(ModelError, match=r"layers.1.mlp.* is not in memory.*load the model without offloading"):
        from_memory(model, tokenizer)
