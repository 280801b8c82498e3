"""s2o-doctor: what it says of an environment, a device, the kernels, a profile and a model, and the exit code."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AutoModelForCausalLM

import s2o_runtime
from calibrate.commands.calibrate import main as calibrate
from calibrate.commands.doctor import main as of_calibrator
from s2o_runtime import load_profile, save_profile
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.command_line import BAD_INPUT, NO_RESOURCE, OK
from s2o_runtime.config import TileConfig
from s2o_runtime.doctor import findings, profile_check, self_test
from s2o_runtime.doctor.command import examine, main
from s2o_runtime.doctor.findings import Finding, Section, choose_exit_code, render_json, render_text
from s2o_runtime.reference import attention
from s2o_runtime.reference.dense import dense_attention, exact_attention
from s2o_runtime.serving.fit import Rank, RankProfile
from support.marks import pairwise
from support.pages import DEMO_PROFILE, ROOT

DEMO = ROOT / "calibrate" / "demo" / "model"
CPU = torch.device("cpu")
DRIVERS = {
    "570.86.15": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (root@host)\nGCC",
    "535.161.08": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Thu Feb 15 00:41:08 UTC 2024\n",
}


@pytest.fixture
def quick(monkeypatch):
    """Without the self-test, which has tests of its own."""
    monkeypatch.setattr(self_test, "run_self_test", lambda device: [Finding("kernel", "left out")])


def doctor(capsys, *arguments, run=main):
    """The exit code, and the findings by section and name."""
    code = run([*map(str, arguments), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (document.pop("exit_code"), document.pop("ready")) == (code, code == OK)
    return code, {
        name: {finding["name"]: finding for finding in section["findings"]} for name, section in document.items()
    }


def test_a_healthy_cpu_is_ready(capsys):
    code, sections = doctor(capsys, "--device", "cpu")
    assert (code, list(sections)) == (OK, ["environment", "device", "self-test"])
    assert sections["environment"]["s2o"]["value"] == s2o_runtime.__version__
    assert sections["environment"]["torch"]["value"].startswith(torch.__version__)
    assert {"vllm", "sglang"} <= set(sections["environment"])
    assert sections["self-test"]["reference"]["verdict"] == "ok"
    assert sections["device"]["device"]["verdict"] == "note"


@pytest.mark.usefixtures("quick")
def test_the_text_marks_what_to_read(capsys, tmp_path):
    profile, path = load_profile(DEMO_PROFILE), tmp_path / "p.safetensors"
    layers = tuple(
        tuple(layer.as_dense() if row == 4 else layer for row, layer in enumerate(bucket)) for bucket in profile.layers
    )
    save_profile(replace(profile, layers=layers), path)
    assert main(["--profile", str(path), "--device", "cpu"]) == OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "ready"
    assert max(map(len, lines)) <= 120
    assert any(line.startswith("- device  cpu: the kernels need an NVIDIA GPU") for line in lines)
    assert any("1024 tokens  5 of 6 layers run S2O (0-3, 5); dense: 4, because every head" in line for line in lines)


def test_problems_decide_the_exit_code_bad_input_first():
    fine, missing = Finding("a", "b"), Finding("c", "d", "e", NO_RESOURCE)
    wrong = Finding("f", "g\x1b[31m", "h", BAD_INPUT)
    assert choose_exit_code([Section("s", [fine])]) == OK
    assert choose_exit_code([Section("s", [fine, missing])]) == NO_RESOURCE
    sections = [Section("s", [missing]), Section("t", [wrong, Finding("i", "j", "k")])]
    assert choose_exit_code(sections) == BAD_INPUT
    assert render_json(sections)["t"]["findings"][0]["verdict"] == "problem"
    assert render_text(sections) == "s\n! c  d: e\n\nt\n! f  g [31m: h\n- i  j: k\n\nnot ready: c, f (marked with !)"


def test_no_host_is_imported_for_a_run():
    program = (
        "import sys\nfrom s2o_runtime.doctor.command import main\n"
        "code = main(['--device', 'cpu', '--profile', sys.argv[1]])\n"
        "print(code, *{'transformers', 'vllm', 'sglang', 'calibrate', 'rich'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", program, str(DEMO_PROFILE)], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "0"


# the environment


def test_without_a_torch_that_can_be_imported_nothing_else_is_looked_at(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        finding = findings.check_package("torch")
    assert finding.code == NO_RESOURCE
    assert "it cannot be imported (ModuleNotFoundError: " in finding.advice
    monkeypatch.setattr(findings, "find_version", lambda package: None)
    (section,) = examine(DEMO_PROFILE)
    assert {finding.name for finding in section.findings if finding.code} == {"torch"}


@pytest.mark.parametrize("version", DRIVERS)
def test_a_driver_that_torch_cannot_use_is_a_problem(version, tmp_path, monkeypatch):
    monkeypatch.setattr(findings, "DRIVER", tmp_path / "version")
    assert findings.check_driver() == Finding("driver", "no NVIDIA driver is loaded")
    (tmp_path / "version").write_text(DRIVERS[version])
    cases = (  # the GPU is visible, torch's CUDA, CUDA_VISIBLE_DEVICES, what is said
        (False, None, None, "this torch is built without CUDA: install a CUDA build of it"),
        (False, "12.8", None, "driver must be one for CUDA 12.8 or newer"),
        (False, "12.8", "", "CUDA_VISIBLE_DEVICES is ''"),
        (True, "12.8", "", ""),
    )
    for available, cuda, visible, advice in cases:
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        finding = findings.check_driver()
        assert (finding.value, finding.code) == (f"NVIDIA {version}", NO_RESOURCE if advice else OK)
        assert finding.advice == advice if not advice else advice in finding.advice
        assert findings.check_driver(wants_gpu=False).verdict == ("note" if advice else "ok")


def test_a_version_that_the_metadata_does_not_ask_for_is_a_note(monkeypatch):
    requires = [
        "torch>=2.6",
        'triton<3.10,>=3.6; platform_system == "Linux"',
        'transformers>=5.0; extra == "calibrate"',
    ]
    versions = {"s2o": "1", "torch": "2.6.0a0+cu128", "triton": "3.5.1", "transformers": "5.1.0.dev0", "sympy": "1"}
    monkeypatch.setattr(findings.metadata, "requires", lambda package: requires)
    monkeypatch.setattr(findings, "find_version", versions.get)
    advice = {name: findings.check_package(name).advice for name in versions}
    assert advice.pop("triton") == "S2O is made for triton<3.10,>=3.6: install one of these versions"
    assert set(advice.values()) == {""}  # builds before a release and torch's own pass for it


def test_a_missing_compiler_is_a_note(monkeypatch, tmp_path):
    monkeypatch.setattr(findings.platform, "system", lambda: "Linux")
    monkeypatch.setattr(findings.shutil, "which", lambda name: None)
    monkeypatch.setattr(findings.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.delenv("CC", raising=False)
    missing = [(finding.name, finding.verdict) for finding in findings.check_compiler()]
    assert missing == [("C compiler", "note"), ("headers", "note")]
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(findings.shutil, "which", lambda name: "/usr/bin/clang" if name == "clang" else None)
    assert list(findings.check_compiler()) == []
    monkeypatch.setenv("CC", "mycc")
    assert "CC names mycc" in next(findings.check_compiler()).advice


@pytest.mark.parametrize("server", findings.SERVERS, ids=lambda server: server[0])
def test_a_server_is_known_by_its_sources_alone(server, tmp_path, monkeypatch):
    name, interface, versions, _, folder, group = server
    sources, variable = tmp_path / name / folder, f"{name.upper()}_PLUGINS"
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert f'[project.entry-points."{group}"]\n{findings.PLUGIN} = ' in pyproject
    real, spec = importlib.util.find_spec, SimpleNamespace(origin=str(tmp_path / name / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: spec if package == name else real(package))
    monkeypatch.setattr(findings, "find_version", {name: "0.33.0"}.get)
    monkeypatch.delenv(variable, raising=False)
    unknown = findings.check_server(*server)
    assert (unknown.name, str(sources) in unknown.advice) == (name, True)
    assert unknown.advice.endswith(f"use one of {', '.join(versions)}")

    inspected, plugins = [], []
    monkeypatch.setattr(findings, "find_interface_obstacle", lambda *arguments: inspected.append(arguments))
    monkeypatch.setattr(findings.metadata, "entry_points", lambda group: plugins if group == server[5] else [])
    assert "does not find S2O's plugin" in findings.check_server(*server).advice
    plugins.append(SimpleNamespace(name="s2o"))
    assert findings.check_server(*server) == Finding(name, "0.33.0, its interface is known and S2O is its plugin")
    assert set(inspected) == {(interface, sources)}
    monkeypatch.setenv(variable, "other")
    assert findings.check_server(*server).advice == f"{variable} is 'other', which leaves S2O out: add s2o"
    assert name not in sys.modules


@pytest.mark.parametrize(
    ("setting", "advice"),
    [
        ('S2O_SETTINGS={"profile": "p"}', ""),
        (f"S2O_PROFILE={DEMO_PROFILE}", ""),
        ("S2O_BEYOND=warn", ""),
        ("S2O_BEYOND=maybe", "S2O_BEYOND is 'maybe': expected one of dense, warn, s2o"),
        ("S2O_DRIFT=maybe", "S2O_DRIFT is 'maybe': expected one of"),
        ("S2O_PROFILE=none.safetensors", "none.safetensors"),
        ("S2O_PROFILES=none", "S2O_PROFILES names none, which is no folder"),
        ("S2O_SETTINGS={", "S2O_SETTINGS is no JSON"),
        ("S2O_PROFLE=p", "nothing reads it: did you mean S2O_PROFILE?"),
        ("S2O_ZZZ=1", "nothing reads it: unset it"),
    ],
)
@pytest.mark.usefixtures("quick")
def test_variables_are_shown_and_checked(setting, advice, capsys, monkeypatch):
    name, _, value = setting.partition("=")
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("S2O_EMPTY", "")  # which is as if it were not set
    assert main(["--device", "cpu", "--json"]) == (BAD_INPUT if advice else OK)
    findings = json.loads(capsys.readouterr().out)["environment"]["findings"]
    shown = {finding["value"]: finding["advice"] for finding in findings if finding["name"] == "variable"}
    assert {*shown} - {"TRITON_INTERPRET=1"} == {setting}
    assert shown[setting] == advice if not advice else advice in shown[setting]


# devices


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("name", "code"), [("cuda:99", NO_RESOURCE), ("tpu", BAD_INPUT)])
def test_a_device_that_cannot_be_examined(name, code, capsys):
    ended, sections = doctor(capsys, "--device", name)
    assert (ended, list(sections)) == (code, ["environment", "device"])
    assert name in sections["device"]["device"]["advice"]


# the self-test


@pytest.mark.parametrize(("factor", "words"), [(1.001, "at most without stopping"), (None, "no C compiler")])
def test_a_wrong_reference_or_one_that_cannot_run_is_a_problem(factor, words, monkeypatch):
    def attention(*arguments, real=self_test.s2o_attention, **options):
        if factor is None:
            raise RuntimeError("no C compiler\nmore")
        result = real(*arguments, **options)
        return result._replace(out=result.out * factor)

    monkeypatch.setattr(self_test, "s2o_attention", attention)
    (finding,) = self_test.run_self_test(CPU)
    assert (finding.code, words in f"{finding.value} {finding.advice}") == (NO_RESOURCE, True)


@pytest.mark.slow(reason="runs the kernels in Triton's interpreter")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_doctor_gpu.py runs the compiled kernel")
def test_the_kernel_passes_in_the_interpreter():
    assert self_test.check_kernel(CPU, TileConfig(64, 32, 2, 4, 1), 573, torch.float32)[1] == ""


EXHAUSTIVE = pytest.mark.exhaustive(reason="the same on further tiles and seeds, a second each")
GPU_TILES = {  # those of `kernel_tiles`, by their stride and height
    "plain": TileConfig(128, 64, 4, 8, 3),
    "specialised": TileConfig(64, 128, 4, 4, 2, True),
    "narrow": TileConfig(128, 32, 8, 8, 3),
}


def test_these_are_the_tiles_of_every_gpu(monkeypatch):
    tiles = {}
    for gpu in [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]:
        monkeypatch.setattr(self_test, "get_capability", lambda device, gpu=gpu: gpu)
        tiles[gpu] = self_test.list_kernel_tiles(CPU)
        assert {tile.specialized for tile in tiles[gpu]} == ({False, True} if gpu == (9, 0) else {False})
    assert {tile for of_gpu in tiles.values() for tile in of_gpu} == set(GPU_TILES.values())


by_reference = partial(s2o_attention, backend="reference", return_stats=True)


@cache
def compared(tile, length):
    """q, k and v of the self-test, to be read only, and a function that judges a result for them as a kernel's."""
    q, k, v = self_test.make_inputs(length, 128, torch.bfloat16, CPU, 0)
    theirs = by_reference(q, k, v, self_test.make_layer(tile))
    truth, dense = exact_attention(q, k, v), dense_attention(q, k, v)
    return (q, k, v), lambda ours: self_test.judge_kernel(tile, ours, theirs, truth, dense)[1]


NAMED_TILES = [pytest.param(tile, id=name) for name, tile in GPU_TILES.items()]


@pytest.mark.parametrize(("tile", "length"), pairwise(NAMED_TILES, [301, 1021, 2045], mark=EXHAUSTIVE, count=3))
def test_the_verdict_does_not_depend_on_rounding(tile, length, monkeypatch):
    """Queries and keys that are off by roundings to bfloat16, and rankings off by much more, are no problem."""
    (q, k, v), judged = compared(tile, length)
    real, generator = attention.make_representatives, torch.Generator().manual_seed(length)

    def rounded(x):
        off = (torch.rand(x.shape, generator=generator) * 2 - 1) * 2**-8
        return (x.float() * (1 + off)).to(x.dtype)

    def part_means(*arguments):
        parts = real(*arguments)
        return parts * (1 + 0.05 * torch.randn(parts.shape, generator=generator))

    monkeypatch.setattr(attention, "make_representatives", part_means)
    for _ in range(2):
        assert not judged(by_reference(rounded(q), rounded(k), v, self_test.make_layer(tile)))


def wrong_kernel(
    tensors, config, *, read=lambda *qkv: qkv, order=lambda ranked: ranked, write=lambda *_: None, **of_heads
):
    """Compute what a kernel would that reads other inputs, visits keys in another order, writes another output, or
    computes the heads that stop with other settings."""
    heads = tuple(replace(head, **of_heads) if head.tau else head for head in config.heads)
    with pytest.MonkeyPatch.context() as patch:
        real = attention.rank
        patch.setattr(attention, "rank", lambda *arguments: order(real(*arguments)))
        result = by_reference(*read(*tensors), replace(config, heads=heads))
    write(result.out, *tensors)
    return result


def one_key_more(out, q, k, v):
    """Rows of the heads that never stop see the key behind them too."""
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril(1)
    for head in (0, 2):
        out[:, head] = sdpa(q[:, head], k[:, head // 2], v[:, head // 2], seen)


WRONG_KERNELS = {
    "it never stops": ({"tau": 0.0}, "density in head 1"),
    "it stops at the first check": ({"tau": 1e6}, "density in head 1"),
    "it estimates no tail": ({"tail": "none"}, "error in head 3"),
    "it estimates a tail unasked": ({"tail": "mean"}, "error in head 1"),
    "it visits in ascending order": ({"order": lambda r: r._replace(order=r.order.sort().values)}, "head 1"),
    "it visits some keys twice": (
        {"order": lambda r: r._replace(order=torch.cat([r.order[:64], r.order[:-64]]))}, "error in head 0"
    ),
    "it reads the keys of another head": ({"read": lambda q, k, v: (q, k.flip(1), v)}, "error in head 0"),
    "it reads the next values": ({"read": lambda q, k, v: (q, k, v.roll(1, 2))}, "error in head 0"),
    "it scales scores by a percent more": ({"read": lambda q, k, v: (q * 1.01, k, v)}, "error in head 0"),
    "it sees a key of the future": ({"write": one_key_more}, "error in head 0"),
    "it leaves a row unwritten": ({"write": lambda out, *_: out[:, 3, -1].fill_(torch.nan)}, "error in head 3"),
}  # fmt: skip


WRONG_CASES = [pytest.param(*case, id=name) for name, case in WRONG_KERNELS.items()]


@pytest.mark.parametrize(
    ("wrong", "expected", "tile"), pairwise(WRONG_CASES, NAMED_TILES, mark=EXHAUSTIVE, count=len(WRONG_CASES))
)
def test_a_wrong_kernel_does_not_pass(wrong, expected, tile):
    tensors, judged = compared(tile, 2045)
    assert expected in judged(wrong_kernel(tensors, self_test.make_layer(tile), **wrong))


# profiles and models


def test_what_is_foreseen_is_what_a_patched_model_does():
    """Layer by layer, at lengths that are too short, between buckets, calibrated and too long."""
    profile = load_profile(DEMO_PROFILE)
    profile = replace(profile, lengths=(256, 384), layers=(profile.layers[0], profile.layers[-1]))
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    seen = set()
    for length in (200, 256, 300, 384, 577):
        with s2o_runtime.patched(model, profile), torch.no_grad():
            model(torch.arange(length)[None] + 100, logits_to_keep=1)
            ran = {(row["layer"], row["path"]): row["reason"] for row in s2o_runtime.explain(model)}
        foreseen = profile_check.list_outcomes(RankProfile(profile, Rank(), CPU), length)
        assert {(row["layer"], row["path"]) for row in foreseen} == ran.keys()
        assert all(ran[row["layer"], "dense"] == row["reason"] for row in foreseen if row["path"] == "dense")
        seen |= {row["path"] for row in foreseen}
    assert seen == {"s2o", "dense"}


def run_of_calibrator(arguments):
    return calibrate(["doctor", *arguments])


@pytest.mark.usefixtures("quick", "offline")
@pytest.mark.parametrize(
    ("run", "profile", "model", "expected"),
    [
        (main, DEMO_PROFILE, DEMO, {
            "profile model": "ok is the profile's: weights compared",
            "model model": "ok llama, 6 layers, 8 query heads, 2 KV heads, head dim 128",
            "profile drift check": "ok on",
        }),
        (main, DEMO_PROFILE, "{folder}", {"profile model": "problem 4 layers where the profile has 6"}),
        (main, ROOT / "README.md", "no/such", {
            "profile profile": "problem README.md", "model model": "problem give a local folder or a hub id",
        }),
        (main, None, "demo", {"model model": "problem give one, or an alias such as demo to s2o-doctor"}),
        (main, "{folder}/answers.safetensors", None, {
            "profile proof": "note kl 0.001 at the rows that answer", "profile dense too": "ok prompt logprobs",
            "profile last layer": "ok in a server, only rows that are read",
        }),
        (main, "{folder}/older.safetensors", DEMO, {
            "profile model": "note is the profile's: weights compared, config not compared",
        }),
        (run_of_calibrator, "{folder}/older.safetensors", "demo", {
            "profile model": "note demo is the profile's: weights compared, config not compared",
        }),
        (main, "{folder}/random.safetensors", None, {"profile weights": "problem calibrated on random weights"}),
        (run_of_calibrator, DEMO_PROFILE, "demo", {
            "model attention in them": "ok 100% at 1024, 100% at 2048 tokens",
            "profile model": "ok demo is the profile's: weights compared",
        }),
        (run_of_calibrator, None, "demoo", {"model model": "problem did you mean demo?"}),
        # the sizes of another alias are known without the Hub, and are not the profile's
        (of_calibrator, DEMO_PROFILE, "qwen2.5-7b", {"profile model": "problem", "model model": "ok 28 layers"}),
    ],
)  # fmt: skip
def test_a_profile_and_a_model(run, profile, model, expected, capsys, tmp_path):
    """They fit one another or not, and an alias shows what a calibration would find."""
    config = json.loads((DEMO / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    shipped = load_profile(DEMO_PROFILE)
    older = replace(shipped, fingerprint=shipped.fingerprint.partition("+config-")[0])
    save_profile(older, tmp_path / "older.safetensors")
    save_profile(replace(shipped, fingerprint="random-1"), tmp_path / "random.safetensors")
    answers = replace(shipped, record={"budget": {"kind": "kl", "value": 1e-3}})
    save_profile(answers, tmp_path / "answers.safetensors")
    flags = [f"--{name}={value}" for name, value in (("profile", profile), ("model", model)) if value]
    code, sections = doctor(capsys, *(flag.format(folder=tmp_path) for flag in flags), run=run)
    assert code == (BAD_INPUT if "problem" in str(expected) else OK)
    for place, words in expected.items():
        section, _, name = place.partition(" ")
        verdict, _, sentence = words.partition(" ")
        finding = sections[section][name]
        assert finding["verdict"] == verdict
        assert sentence in f"{finding['value']}: {finding['advice']}"


def test_transformers_is_needed_for_a_model_only(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(self_test, "run_self_test", lambda device: [])
    *_, model, profile = examine(model="a/b", profile=DEMO_PROFILE, device="cpu")
    assert [(finding.name, finding.code) for finding in model.findings] == [("model", NO_RESOURCE)]
    assert "1024 tokens" in {finding.name for finding in profile.findings}
