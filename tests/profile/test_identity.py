"""A model is its function: what changes it is another model, what only wraps it is the same."""

import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig

from s2o_runtime import explain, load_profile, patch, unpatch
from s2o_runtime.errors import ProfileError
from s2o_runtime.identity import (
    BASE,
    WITHOUT_EFFECT,
    _read_rope_parameters,
    compose_fingerprint,
    explain_config_mismatch,
    explain_mismatch,
    select_config_values,
)
from s2o_runtime.profile import save_profile
from support.models import CONFIGS, SIZES, make_profile, twin
from support.pages import DEMO_PROFILE, ROOT

SAVED = json.loads((ROOT / "tests/golden/transformers-configs.json").read_text(encoding="utf-8"))
MOE = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": False}


def random_model(config, seed=1, made=AutoModelForCausalLM):
    """A model whose weights are all random, those of norms too."""
    torch.manual_seed(seed)
    model = made.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.25)
    return model


def refusal(model, profile):
    """Return why strict patching refuses a model; None if it does not. Patching without strict never does."""
    try:
        patch(model, profile, strict=True, drift=None)
        return None
    except ProfileError as error:
        patch(model, profile, drift=None)
        return str(error)
    finally:
        unpatch(model)


@torch.no_grad()
@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (transformers.Qwen3MoeConfig(**MOE), "num_experts_per_tok", 1),
        (transformers.GraniteConfig(**SIZES, attention_multiplier=0.125), "attention_multiplier", 0.03),
        (transformers.Gemma2Config(**SIZES, sliding_window=64), "sliding_window", 16),
        (transformers.Gemma2Config(**SIZES), "final_logit_softcapping", None),
        (LlamaConfig(**SIZES), "rms_norm_eps", 0.5),
        (LlamaConfig(**SIZES), "hidden_act", "relu"),
    ],
    ids=lambda case: case if isinstance(case, str) else None,
)
def test_an_edited_config_is_another_model_and_the_sentence_names_the_field(config, field, value, caplog):
    model = random_model(config)
    edited = copy.deepcopy(model.config)
    setattr(edited, field, value)
    other, ids = twin(model, "eager", edited), torch.randint(3, 128, (1, 300))
    assert (model(ids).logits - other(ids).logits).abs().max() > 1e-3
    profile = make_profile(model, 2.0)
    assert refusal(model, profile) is None
    new, old = json.dumps(value), json.dumps(select_config_values(config)[field])
    sentence = f"the config ({field} is {new} where the profile has {old}) is not the one of tiny"
    assert sentence in refusal(other, profile)
    assert sentence in caplog.text


def test_fields_without_effect_make_no_other_model():
    config = LlamaConfig(**SIZES)
    edited = copy.deepcopy(config)
    changes = {
        "use_cache": False, "dtype": torch.float16, "attention_dropout": 0.5, "eos_token_id": [2, 5], "bos_token_id": 9,
        "initializer_range": 1.0, "max_position_embeddings": 77, "output_attentions": True, "pretraining_tp": 2,
        "architectures": ["Other"], "transformers_version": "9", "name_or_path": "elsewhere", "id2label": {0: "a"},
    }  # fmt: skip
    for field, value in changes.items():
        setattr(edited, field, value)
    assert compose_fingerprint("weights", edited) == compose_fingerprint("weights", config)


def test_positions_count_where_rope_is_by_them():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    short, long = (SimpleNamespace(max_position_embeddings=n, rope_parameters=rope) for n in (1024, 2048))
    assert "max_position_embeddings" in explain_config_mismatch(select_config_values(short), select_config_values(long))


def test_fields_with_an_effect_are_not_left_out():
    names = (
        "num_experts_per_tok num_experts_per_token moe_top_k norm_topk_prob rope_interleave layer_types no_rope_layers "
        "attn_logit_softcapping output_multiplier attn_output_gate swiglu_limit attention_bias routed_scaling_factor "
        "attention_chunk_size attn_temperature_tuning layer_norm_eps"
    )
    assert not [name for name in names.split() if WITHOUT_EFFECT.fullmatch(name)]


@pytest.mark.parametrize("name", SAVED["5.0.0"])
def test_one_model_saved_by_the_oldest_and_the_newest_transformers_is_the_same(name):
    """By its files as they are, and as the transformers that is installed reads them."""
    texts = [SAVED[version][name] for version in ("5.0.0", "5.24.0")]
    assert texts[0] != texts[1]
    as_saved = [SimpleNamespace(**text) for text in texts]
    # transformers 5.17 cannot read the rope_parameters that 5.0 writes of Gemma 3
    loaded = [transformers.AutoConfig.for_model(**text) for text in texts[name == "gemma3_text" :]]
    for configs in (as_saved, loaded):
        values = [select_config_values(config) for config in configs]
        assert explain_config_mismatch(values[0], values[-1]) is None
        assert len(values[0].keys() & values[-1].keys()) >= 4
        assert _read_rope_parameters(configs[0]) == _read_rope_parameters(configs[-1]) != {}
    first, newest = (compose_fingerprint("weights", config) for config in as_saved)
    assert explain_mismatch(first, newest) is None
    edited = SimpleNamespace(**texts[1] | {"rms_norm_eps": 0.125})
    assert "rms_norm_eps is 0.125 where" in explain_mismatch(compose_fingerprint("weights", edited), first)


def test_values_are_written_one_way():
    config = SimpleNamespace(a=1.0, b=9.999999974752427e-07, c=float("inf"), d=(1, None), e=torch.float16, f={"g": 2.0})
    assert json.dumps(select_config_values(config)) == (
        '{"a": 1, "b": 1e-06, "c": "Infinity", "d": [1, null], "e": "dtype", "f": {"g": 2}}'
    )


def test_wrappers_of_a_model_are_the_model():
    model = random_model(CONFIGS["llama"])
    profile = make_profile(model, 2.0)
    assert refusal(torch.compile(model, backend="eager"), profile) is None
    model.model.layers[1].mlp = torch.compile(model.model.layers[1].mlp, backend="eager")
    assert refusal(model, profile) is None


@pytest.mark.parametrize("tied", [False, True], ids=["its own head", "a tied head"])
def test_a_model_without_its_head_is_the_model(tied, tmp_path):
    """As embedding and reward models are loaded."""
    model = random_model(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    profile = make_profile(model, 2.0)
    assert (BASE in profile.fingerprint) is not tied
    model.save_pretrained(tmp_path)
    for made in (AutoModel, transformers.AutoModelForSequenceClassification):
        base = made.from_pretrained(tmp_path, attn_implementation="eager").eval()
        assert refusal(base, profile) is None
        with torch.no_grad():
            base.get_input_embeddings().weight.add_(1.0)
        assert "the weights are not those of tiny" in refusal(base, profile)
    assert "the weights are not those" in refusal(random_model(model.config, 2, AutoModel), profile)
    with torch.no_grad():
        model.get_output_embeddings().weight.add_(1.0)
    assert "the weights are not those" in refusal(model, profile)  # another head is another model


@pytest.fixture
def adapted():
    """A model with two LoRA adapters that have an effect, "law" and "code"."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"])
    model = peft.get_peft_model(random_model(CONFIGS["llama"]), config, adapter_name="law")
    model.add_adapter("code", config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


ADAPTERS = "the active adapters are not those of tiny"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda model: model.set_adapter("code"), ADAPTERS),
        (lambda model: model.base_model.set_adapter(["law", "code"]), ADAPTERS),
        (lambda model: model.base_model.disable_adapter_layers(), ADAPTERS),
        (
            lambda model: [module.scale_layer(8) for module in model.modules() if hasattr(module, "scale_layer")],
            ADAPTERS,
        ),
        (lambda model: model.merge_adapter(), "the weights are not those of tiny"),
        (lambda model: None, None),
        (lambda model: model.delete_adapter("code"), None),
    ],
    ids=["another", "two", "none", "scaled", "merged", "the same", "an idle one less"],
)
def test_other_active_adapters_are_another_model(change, why, adapted):
    profile = make_profile(adapted, 2.0)
    change(adapted)
    for model in (adapted, adapted.get_base_model(), torch.compile(adapted, backend="eager")):
        refused = refusal(model, profile)
        assert refused is None if why is None else why in refused


def test_an_adapter_without_an_effect_and_a_merged_one_are_the_weights_alone(adapted):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = random_model(CONFIGS["llama"])
    plain = make_profile(model, 2.0)
    assert ADAPTERS in refusal(adapted, plain)
    adapted.base_model.disable_adapter_layers()
    assert refusal(adapted, plain) is None
    for kind in ({"target_modules": ["q_proj", "embed_tokens"]}, {"target_modules": ["q_proj"], "lora_bias": True}):
        assert refusal(peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=4, **kind)), plain) is None
    adapted.base_model.enable_adapter_layers()
    adapted.merge_adapter()
    merged = make_profile(adapted, 2.0)
    assert refusal(adapted.merge_and_unload(), merged) is None


def test_modules_and_prompts_that_peft_trained_are_another_model():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = random_model(CONFIGS["llama"])
    plain = make_profile(model, 2.0)
    prompted = peft.get_peft_model(copy.deepcopy(model), peft.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=4))
    assert ADAPTERS in refusal(prompted, plain)
    trained = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"]))
    profile = make_profile(trained, 2.0)
    assert refusal(trained, profile) is None
    with torch.no_grad():
        next(parameter for name, parameter in trained.named_parameters() if "modules_to_save" in name).add_(1.0)
    assert ADAPTERS in refusal(trained, profile)


def test_a_profile_without_the_config_is_said_to_be_one_and_refused_under_strict(info_log):
    model, profile = AutoModelForCausalLM.from_pretrained("calibrate/demo/model"), load_profile(DEMO_PROFILE)
    profile = replace(profile, fingerprint=profile.fingerprint.partition("+config-")[0])
    patch(model, profile)
    said = [message for message in info_log.messages if "config not compared" in message]
    assert said == ["config not compared: the profile of demo lacks the values of config.json: calibrate again"]
    assert explain(model) == []
    unpatch(model)
    why = "lacks the values of config.json: calibrate again, or patch with strict=False"
    assert why in refusal(model, profile)


def test_a_fingerprint_in_a_foreign_file_is_not_taken_for_values(tmp_path, monkeypatch):
    model = random_model(CONFIGS["llama"])
    with monkeypatch.context() as patches:
        patches.setattr("s2o_runtime.profile.file.split_fingerprint", lambda _: {"fingerprint": "a+base-b+config-{"})
        save_profile(make_profile(model, 2.0), tmp_path / "p.safetensors")
    assert load_profile(tmp_path / "p.safetensors").fingerprint == "a"
    assert "the weights are not those" in refusal(model, tmp_path / "p.safetensors")
