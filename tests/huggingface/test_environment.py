"""S2O_PROFILE and s2o-run: models that fit the profile run S2O, all others stay as they are, bit for bit."""

import copy
import dataclasses
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, DynamicCache, MistralConfig, T5Config

from s2o_runtime import explain, patch, unpatch
from s2o_runtime.errors import ConfigError, ModelError, ProfileError
from s2o_runtime.huggingface import hf, run, sdpa
from s2o_runtime.profile import save_profile
from support.architectures import CASES
from support.environment import restore_sdpa, under_s2o_run
from support.models import (
    CONFIGS,
    LENGTH,
    RUNS,
    SIZES,
    close,
    make_profile,
    new_model,
    padded_batch,
    paths,
    prompt,
    twin,
)

RANDOM = "the path of a profile of random weights"
SLOW = pytest.mark.slow(reason="starts processes that load a model")


@pytest.fixture
def model():
    return new_model()


@pytest.fixture
def profile(model):
    return make_profile(model, 0.5)


@torch.no_grad()
def test_other_weights_are_warned_about_once(named, caplog):
    hf.register()
    other = new_model(implementation="s2o")
    for _ in range(2):
        other(prompt())
    assert ["the weights are not those of tiny" in record.getMessage() for record in caplog.records] == [True]
    assert paths(other) == {("s2o", RUNS)}


@torch.no_grad()
@pytest.mark.parametrize(
    ("beyond", "drift", "states"),
    [(None, None, (300, "warn")), ("s2o", "dense", (None, "dense")), ("warn", "off", (300, None))],
)
def test_beyond_and_drift_are_those_of_the_environment(model, profile, named, monkeypatch, beyond, drift, states):
    record = {"budget": {"kind": "mse", "value": 1.0}}
    save_profile(dataclasses.replace(profile, lengths=(200,), layers=profile.layers[:1], record=record), named)
    for variable, value in (("S2O_BEYOND", beyond), ("S2O_DRIFT", drift)):
        if value is not None:
            monkeypatch.setenv(variable, value)
    hf.register()
    ours = twin(model, "s2o")
    ours(prompt())
    assert paths(ours) == {("s2o", RUNS)}
    for state in hf.get_layer_states(ours):
        assert (state.max_length, state.drift and state.drift.check.action) == states
        assert state.warn_beyond == (beyond == "warn")


@pytest.mark.parametrize(
    ("variable", "value", "error", "message"),
    [
        ("S2O_PROFILE", "missing", ProfileError, r"S2O_PROFILE: .*missing cannot be read .*: check the path"),
        ("S2O_DRIFT", "64", ConfigError, "S2O_DRIFT is '64': expected one of "),
        ("S2O_DRIFT", "warn", ProfileError, "S2O_PROFILE: the profile's record names no budget"),
        ("S2O_PROFILE", RANDOM, ProfileError, "calibrated on random weights"),
    ],
)
def test_what_the_environment_cannot_mean_fails_at_once(profile, named, monkeypatch, variable, value, error, message):
    if value == RANDOM:
        save_profile(dataclasses.replace(profile, fingerprint="random-0"), value := named)
    monkeypatch.setenv(variable, str(value))
    with pytest.raises(error, match=message):
        hf.register()


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["s2o", "sdpa"])
def test_unpatch_takes_it_away_for_good(model, taken_over, implementation):
    plain = twin(model, "eager")
    ours, ids = twin(model, implementation), prompt()
    before = ours(ids).logits
    unpatch(ours)
    for _ in range(2):
        dense = ours(ids).logits
        close(dense, plain(ids).logits)
    assert not torch.equal(dense, before)
    assert ours.config._attn_implementation == implementation
    with pytest.raises(ModelError, match="the model is not patched"):
        explain(ours)
    if implementation == "sdpa":
        restore_sdpa()
        assert torch.equal(ours(ids).logits, dense)


@torch.no_grad()
def test_patch_comes_before_the_environment(model, profile, taken_over):
    ids = prompt()
    model(ids)
    patch(model, dataclasses.replace(profile, lengths=(180,)))
    model(ids[:, :150])
    model(ids)
    assert paths(model) == {("s2o", RUNS), ("dense", "shorter than the shortest calibrated length, 180")}
    assert unpatch(model).config._attn_implementation == "sdpa"


# models with their type, and what is said of them; the sliding one has no layer that S2O could be for
OTHERS = {
    "encoder": (BertConfig(vocab_size=128, hidden_size=48, intermediate_size=64, num_hidden_layers=2), AutoModel, ""),
    "encoder-decoder": (
        T5Config(vocab_size=128, d_model=64, d_ff=64, num_layers=2, decoder_start_token_id=0), AutoModel,
        "a model of type 't5' is an encoder with a decoder",
    ),
    "another-architecture": (
        CONFIGS["qwen2"], AutoModelForCausalLM, "it has architecture qwen2 where the profile has llama"
    ),
    "soft-capped": (CASES["gemma2"].config, AutoModelForCausalLM, "the model caps its attention scores"),
    "sliding": (MistralConfig(**SIZES, sliding_window=48), AutoModelForCausalLM, ""),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_untouched(name, named, caplog):
    """Outputs, bit for bit; padded, whole and one token. Of decoders it is said once."""
    config, kind, reason = OTHERS[name]
    other = kind.from_config(copy.deepcopy(config)).eval()
    ids, mask = padded_batch()
    more = {"decoder_input_ids": ids[:, :50]} if name == "encoder-decoder" else {}

    def outputs():
        yield from (other(ids, attention_mask=mask, **more)[0], other(ids, **more)[0], other(ids[:, :1], **more)[0])

    expected = list(outputs())
    with under_s2o_run():
        assert all(map(torch.equal, outputs(), expected))
    assert not run.attached
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    if not reason or other.config._attn_implementation != "sdpa":  # soft-capped models since transformers 5.23
        assert said == []
    else:
        (sentence,) = said
        assert reason in sentence
        assert sentence.endswith("it stays dense")


@torch.no_grad()
@pytest.mark.parametrize("how", ["decode", "holes", "own-mask", "not-causal", "dropout", "packed"])
def test_calls_that_s2o_is_not_for_are_sdpas(how, model, named):
    """Of a model that fits: the same bits as without s2o-run."""
    ids = prompt()
    mask = torch.ones_like(ids)
    mask[0, 40:60] = 0
    calls = {
        "holes": {"attention_mask": mask},
        "own-mask": {"attention_mask": torch.ones(1, 1, LENGTH, LENGTH).tril().bool()},
        "packed": {"position_ids": torch.cat([torch.arange(80), torch.arange(LENGTH - 80)])[None], "use_cache": False},
    }
    if how == "not-causal":  # such as an encoder that was made of a decoder
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
    if how == "dropout":
        model.train()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.3

    def once():
        torch.manual_seed(4)
        return model(ids[:, :1] if how == "decode" else ids, **calls.get(how, {})).logits

    expected = once()
    with under_s2o_run():
        assert torch.equal(once(), expected)
        reason = {"dropout": "the model is in training mode", "not-causal": "the layer is not causal"}.get(how)
        assert reason is None or paths(model) == {("dense", reason)}


@SLOW
@torch.no_grad()
def test_compiled_models(model, profile, named):
    """Compiled before any ran: as without s2o-run. After one ran: one graph that runs S2O."""
    ids = prompt()
    dense = model(ids).logits
    with under_s2o_run():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        close(compiled(ids, past_key_values=DynamicCache(config=CONFIGS["llama"])).logits, dense)
        expected = model(ids).logits
        torch.compiler.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        close(compiled(ids, past_key_values=DynamicCache(config=CONFIGS["llama"])).logits, expected)
    assert [row["calls"] for row in explain(model)] == [2, 2]


NAMED, NO = "the path of the profile", "no-such-command"
PROGRAM = """
    import sys
    assert "torch" not in sys.modules and "transformers" not in sys.modules and "s2o_runtime" not in sys.modules
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
    with torch.no_grad():
        logits = model(torch.arange(3, 103)[None].repeat(1, 2)).logits
    torch.save(logits, sys.argv[2])
    print(model.config._attn_implementation, sys.argv[3:], type(sys.modules["transformers.modeling_utils"].__loader__))
"""


def start(*arguments, folder=None, **variables):
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith("S2O_")} | variables
    command = [sys.executable, "-m", "s2o_runtime.huggingface.run", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=surroundings, cwd=folder)


@pytest.fixture
def program(tmp_path, model):
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return [sys.executable, path, tmp_path / "model", tmp_path / "logits.pt"]


@SLOW
@torch.no_grad()
def test_s2o_run_runs_a_program_with_the_profile(program, model, profile, tmp_path):
    save_profile(profile, tmp_path / "p.safetensors")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("print('the hidden one ran')")
    path = os.pathsep.join(filter(None, (str(hidden), os.environ.get("PYTHONPATH"))))
    flags = ("--profile", "p.safetensors", "--explain", *program, "--flag", "a b")
    done = start(*flags, folder=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *["the hidden one ran"] * 2,  # in s2o-run's own interpreter, and in the program's
        "sdpa ['--flag', 'a b'] <class '_frozen_importlib_external.SourceFileLoader'>",
    ]
    assert "no model of this program" not in done.stderr
    table = done.stderr.splitlines()[-3:]
    assert [line.split()[:3] for line in table] == [["layer", "path", "calls"], ["0", "s2o", "1"], ["1", "s2o", "1"]]
    ids = torch.arange(3, 103)[None].repeat(1, 2)
    ours, dense = torch.load(tmp_path / "logits.pt"), model(ids).logits
    expected = patch(model, profile)(ids).logits
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)  # other threads may add in another order
    assert (expected - dense).abs().max() > 1e-4


@torch.no_grad()
def test_why_no_model_ran(model, profile, taken_over, monkeypatch):
    monkeypatch.setenv("S2O_STARTED", str(os.getpid()))
    assert sdpa.find_why_none_ran().startswith("no transformers model with SDPA attention had a plain causal prefill")
    monkeypatch.setenv("S2O_STARTED", "1")
    assert sdpa.find_why_none_ran() is None  # a helper
    for length in (50, 50, 1):
        model(prompt(length))
    assert sdpa.find_why_none_ran() == "shorter than the shortest calibrated length, 100"
    run.warn_dense("it does not fit")
    assert sdpa.find_why_none_ran() == "it does not fit"
    model(prompt())
    assert sdpa.find_why_none_ran() is None


@SLOW
def test_flags_are_checked_and_passed_on(profile, tmp_path):
    save_profile(profile, tmp_path / "p.safetensors")
    code = "import os, sys; print(os.environ['S2O_BEYOND'], os.environ['S2O_DRIFT']); "
    code += "print(sorted({'torch', 'transformers', 's2o_runtime'} & set(sys.modules))); sys.exit(7)"
    flags = ("--profile", tmp_path / "p.safetensors", "--beyond", "warn", "--drift", "off")
    done = start(*flags, sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (7, "warn off\n[]\n")
    assert done.stderr.splitlines() == [
        "s2o-run: no model of this program ran S2O in this process: it did not import transformers' models"
    ]


def test_an_interpreter_without_s2o_says_so_and_goes_on(tmp_path):
    """The hook must never keep a program from starting."""
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "modeling_utils.py").write_text("WORKS = True")
    code = "import transformers.modeling_utils as m; print(m.WORKS)"
    done = subprocess.run(
        [sys.executable, "-ES", "-c", f"import sys; sys.path[:0] = {[str(run.SITE), str(tmp_path)]!r}; "
         f"import sitecustomize; {code}"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout == "True\n"
    assert done.stderr.startswith("s2o-run: models run without S2O (ModuleNotFoundError: No module named 's2o_runtime'")


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ((NO,), {"S2O_PROFILES": "no/such"}, "s2o-run: S2O_PROFILES names no/such, which is no folder: name folders "),
        ((NO,), {"S2O_BEYOND": "never"}, "s2o-run: S2O_BEYOND is 'never': expected one of "),
        ((NO,), {"S2O_PROFILE": "no/such"}, "s2o-run: S2O_PROFILE: no/such cannot be read (No such file or "),
        (("--profile", "no/such", NO), {}, "s2o-run: --profile: no/such cannot be read"),
        ((NO,), {"S2O_PROFILE": NAMED, "S2O_DRIFT": "loud"}, "s2o-run: S2O_DRIFT is 'loud': expected one of "),
        ((NO, "--profile", "x"), {"S2O_PROFILE": NAMED}, "s2o-run: no-such-command cannot be run (No "),
    ],
)
def test_what_keeps_a_command_from_starting(arguments, variables, message, named, monkeypatch, capsys):
    given = {name: str(named) if value is NAMED else value for name, value in variables.items()}
    monkeypatch.setattr(os, "environ", {name: os.environ[name] for name in os.environ if name[:4] != "S2O_"} | given)
    assert run.main(arguments) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith(message)
    assert error.count("\n") == 1
