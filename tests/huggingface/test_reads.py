"""Under a budget of answers, calls of transformers models whose callers read more than the last rows run dense."""

import copy
import dataclasses

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from s2o_runtime import explain, patch, patched
from s2o_runtime.dense_reason import DenseReason
from s2o_runtime.errors import ConfigError
from s2o_runtime.huggingface import hf
from s2o_runtime.monitor.counters import REMEDIES
from s2o_runtime.profile import save_profile
from support.models import LENGTH, RUNS, make_profile, new_model, paths, pickled, prompt, twin, with_adapter

LAST_ROWS = 128
SPARSE, DECODE = ("s2o", RUNS), ("dense", "decode")


class WithoutKeep(LlamaForCausalLM):
    """A model of a repository of its own, whose logits are of all rows."""

    def forward(self, input_ids=None, attention_mask=None, **options):
        return super().forward(input_ids, attention_mask, **options)


@pytest.fixture
def profile(eager):
    """A budget of answers, whose last rows are exact."""
    made = make_profile(eager, 1e6, last_rows=LAST_ROWS)
    return dataclasses.replace(made, record={"budget": {"kind": "kl", "value": 1e-3}})


def generate(**options):
    return lambda model, ids: model.generate(ids, max_new_tokens=2, do_sample=False, eos_token_id=-1, **options)


DENSE = {
    "lm-eval": (lambda model, ids: model(ids).logits, DenseReason.ALL_LOGITS),  # its HFLM's log-likelihoods
    "more": (lambda model, ids: model(ids, logits_to_keep=LAST_ROWS + 1), DenseReason.ALL_LOGITS),
    "rows": (lambda model, ids: model(ids, logits_to_keep=torch.tensor([0])), DenseReason.ALL_LOGITS),
    "loss": (lambda model, ids: model(ids, labels=ids), DenseReason.LOSS),
    "hidden": (lambda model, ids: model(ids, logits_to_keep=1, output_hidden_states=True), DenseReason.HIDDEN_STATES),
    "bare": (lambda model, ids: model.get_decoder()(ids, logits_to_keep=1), DenseReason.HIDDEN_STATES),
    "generated": (generate(output_hidden_states=True, return_dict_in_generate=True), DenseReason.HIDDEN_STATES),
}
RUN = {
    "last": lambda model, ids: model(ids, logits_to_keep=LAST_ROWS),
    "greedy": generate(),
    "beams": generate(num_beams=2),
    "chunks": lambda model, ids: generate(
        prefill_chunk_size=LENGTH - 1, past_key_values=DynamicCache(config=model.config)
    )(model, ids),
    "lookup": generate(prompt_lookup_num_tokens=3),
}


HANDLES = {
    "plain": lambda model: model,
    "copy": copy.deepcopy,
    "pickled": pickled,
    "peft": lambda model: with_adapter(model).eval(),
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled-in-place": lambda model: model.compile(backend="eager") or model,
}


def paths_of(call, model):
    """List what one call of a model runs, and why."""
    for state in hf.get_layer_states(model):
        state.counts.clear()
    call(model, prompt())
    return paths(model)


@torch.no_grad()
@pytest.mark.parametrize("handle", HANDLES)
def test_what_returns_more_than_last_rows_is_dense_and_generate_is_not(eager, profile, handle):
    model = HANDLES[handle](patch(twin(eager), profile, drift=None))
    for name, (call, reason) in DENSE.items():
        if handle == "plain" or name in ("lm-eval", "bare"):
            assert paths_of(call, model) - {DECODE} == {("dense", reason)}, name
    for name, call in RUN.items():
        if handle == "plain" or name in ("last", "greedy"):
            assert paths_of(call, model) - {DECODE} == {SPARSE}, name
    assert str(explain(model)).endswith("calls that return more than the last 128 rows run dense")


@torch.no_grad()
def test_generate_is_known_where_a_model_cannot_be_told_which_logits_to_keep(eager, profile):
    model = WithoutKeep(eager.config).eval()
    model.load_state_dict(eager.state_dict())
    patch(model, profile, drift=None)
    assert paths_of(generate(), model) == {SPARSE, DECODE}
    assert paths_of(lambda model, ids: model(ids), model) == {("dense", DenseReason.ALL_LOGITS)}


@torch.no_grad()
def test_a_caller_may_say_what_it_reads(eager, profile, caplog):
    model, every = twin(eager), make_profile(eager, 1e6)
    for call in (DENSE["lm-eval"][0], DENSE["bare"][0], generate()):
        for chosen, reads, path in (
            (profile, "answers", "s2o"), (profile, "all", "dense"), (every, None, "s2o"), (every, "all", "s2o")
        ):  # fmt: skip
            with patched(model, chosen, drift=None, reads=reads):
                assert {ran for ran, _ in paths_of(call, model) - {DECODE}} == {path}
    with pytest.raises(ConfigError, match="reads is 'last': expected one of all, answers or none"):
        patch(model, profile, reads="last")
    caplog.clear()
    patch(model, profile, drift=None)
    for _ in range(2):
        model(prompt(50))
        model(prompt())
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    reason = DenseReason.ALL_LOGITS
    assert warning == f"S2O does not run: {reason} for a prompt of {LENGTH} keys: {REMEDIES[reason]}"


@torch.no_grad()
def test_the_first_call_of_a_model_with_its_profile_from_the_environment_counts(eager, profile, named):
    save_profile(profile, named)
    hf.register()
    for call, expected in ((generate(), {SPARSE, DECODE}), DENSE["lm-eval"]):
        ours = twin(eager, "s2o")
        call(ours, prompt())
        assert paths(ours) == (expected if isinstance(expected, set) else {("dense", expected)})


@torch.no_grad()
def test_lm_evals_log_likelihoods_are_dense_and_its_generation_is_not(profile):
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="lm-eval is not installed")
    from support.tiny import tiny_tokenizer

    model = patch(new_model(), profile, drift=None)
    harness = huggingface.HFLM(pretrained=model, tokenizer=tiny_tokenizer(), batch_size=1, max_length=512)
    ids = prompt()[0].tolist()
    harness._loglikelihood_tokens([(("", ""), ids[:-2], ids[-2:])], disable_tqdm=True)
    assert paths(model) == {("dense", DenseReason.ALL_LOGITS)}
    assert paths_of(lambda _, ids: harness._model_generate(ids, LENGTH + 5, []), model) == {SPARSE, DECODE}
