"""Sensitivities predict what injected errors do to answers, whatever holds the weights."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from calibrate.curves.measure import (
    SENSITIVITY,
    SENSITIVITY_PROMPTS,
    SENSITIVITY_TOKENS,
    join_questions,
    measure_on_prompts,
)
from calibrate.model.sensitivity import AnsweredText, measure_sensitivity
from calibrate.prompts.prompt import Prompt
from s2o_runtime.errors import ModelError
from support.models import save, stream
from support.tiny import recipe, tiny_tokenizer

NATS = 1e-6  # of KL that each injected error is predicted to cost: little, so that the second order holds
DRAWS = 48  # of noise
TOKEN_DRAWS = 24  # of sampled tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With weights small enough that predictions are neither certain nor chaotic, and heads that count unequally."""

    def change(model):
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.data *= torch.tensor([0.5, 1.0, 1.5, 2.0]).repeat_interleave(64)

    return save("llama", tmp_path_factory.mktemp("model"), change)


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(0)
    return [
        AnsweredText(torch.randint(3, 128, (length,), generator=generator), length // 2, torch.tensor([length - 1]))
        for length in (96, 128)
    ]


@pytest.fixture(scope="module")
def weights(folder, prompts):
    """float64 [layers, heads], the mean over several draws of tokens."""
    loaded = stream(folder, resident=True)
    return torch.tensor(
        [measure_sensitivity(loaded, prompts, seed) for seed in range(TOKEN_DRAWS)], dtype=torch.float64
    ).mean(0)


def kl_of_noise(model, prompts, variances):
    """The mean KL per answer token when heads' outputs get Gaussian noise before the questions, by layer and head."""
    draw = torch.Generator().manual_seed(1)

    def noisy(module, query, key, value, attention_mask, scaling, **kwargs):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        if noise and module.layer_idx in variances:
            deviations = torch.tensor(variances[module.layer_idx]).sqrt()
            rows = torch.arange(out.shape[2])[:, None] < text
            out = out + rows * deviations[:, None, None] * torch.randn(out.shape, generator=draw)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("test_noise", noisy)
    model.set_attn_implementation("test_noise")
    total = 0.0
    with torch.no_grad():
        for prompt in prompts:
            noise, text = False, prompt.text
            dense = model(prompt.ids[None], use_cache=False).logits[0, prompt.rows].double().log_softmax(-1)
            noise = True
            for _ in range(DRAWS):
                other = model(prompt.ids[None], use_cache=False).logits[0, prompt.rows].double().log_softmax(-1)
                total += float((dense.exp() * (dense - other)).sum(-1).mean())
    return total / len(prompts) / DRAWS


@pytest.mark.parametrize("place", [{0: (0,)}, {0: (3,)}, {0: (0, 1, 2, 3)}], ids=str)
def test_the_kl_of_injected_noise_is_as_predicted(folder, prompts, weights, place):
    """In one head, or at equal predicted cost in all; the draws of noise and tokens differ by a few percent."""
    count = sum(map(len, place.values()))
    variances = {
        layer: [NATS / count / weights[layer, head].item() if head in heads else 0.0 for head in range(4)]
        for layer, heads in place.items()
    }
    assert kl_of_noise(stream(folder, resident=True).model, prompts, variances) == pytest.approx(NATS, rel=0.15)


def test_the_last_layer_reaches_no_answer(weights):
    """Its rows before the questions feed nothing that is read."""
    assert (weights[0] > 0).all()
    assert (weights[1] == 0).all()


def test_one_layer_at_a_time_gives_the_same_and_leaves_nothing_behind(folder, prompts):
    streamed = stream(folder, resident=False)
    before = streamed.model.config._attn_implementation
    weighed = measure_sensitivity(streamed, prompts, 0)
    assert weighed == measure_sensitivity(stream(folder, resident=True), prompts, 0)
    assert weighed != measure_sensitivity(streamed, prompts, 1)
    assert all(parameter.is_meta and parameter.grad is None for parameter in streamed.model.parameters())
    assert streamed.model.config._attn_implementation == before


@pytest.mark.parametrize("projections", [("q_proj", "k_proj", "v_proj"), ("o_proj",)], ids=str)
def test_weights_without_gradients_or_with_nan_are_one_sentence(folder, prompts, projections):
    """Kernels of quantised weights may have no backward pass: nothing is taken for a sensitivity of zero.

    Where only the head, which the gradient comes through, is NaN, the forward pass is finite.
    """
    loaded = stream(folder, resident=True)
    attention = loaded.model.model.layers[1].self_attn
    for name in projections:
        projection = getattr(attention, name)
        projection.forward = torch.no_grad()(projection.forward)
    with pytest.raises(ModelError, match=r"^layer 1: its weights let no gradient through, .* use a checkpoint"):
        measure_sensitivity(loaded, prompts, 0)
    broken = stream(folder, resident=True)
    broken.model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(ModelError, match=r"layer 1, prompt 0: the gradient of attention holds inf or NaN"):
        measure_sensitivity(broken, prompts, 0)


def test_it_is_measured_once_on_the_longest_prompts_that_are_not_too_long(folder, tmp_path, journal):
    def prompt(length, number):
        return Prompt(torch.full((length,), 3 + number))

    loaded, settings = stream(folder, resident=True), recipe("tiny", tmp_path / "p", seed=5)
    loaded = replace(loaded, tokenizer=tiny_tokenizer())
    by_length = {
        length: [prompt(length, number) for number in range(SENSITIVITY_PROMPTS + 1)]
        for length in (32, 64, SENSITIVITY_TOKENS + 64)
    }
    measured = measure_on_prompts(loaded, by_length, settings, journal)
    ((key, value),) = journal.entries(SENSITIVITY)
    assert key == {"prompts": [one.sha256 for one in by_length[64][:SENSITIVITY_PROMPTS]], "tokens": 64, "seed": 5}
    assert measured == tuple(map(tuple, value))
    texts = [join_questions(loaded.tokenizer, one.ids) for one in by_length[64][:SENSITIVITY_PROMPTS]]
    assert measured == measure_sensitivity(loaded, texts, 5)
    journal.put(SENSITIVITY, key, [[7.0]])
    assert measure_on_prompts(loaded, by_length, settings, journal) == ((7.0,),)
