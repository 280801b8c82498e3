"""s2o-profile on a real calibration of the demo model, in this process but for one start from cold."""

import dataclasses
import json
import re
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import yaml

from calibrate.commands import calibrate as cli
from calibrate.commands import profile as profile_cli
from calibrate.machine import MARK
from calibrate.profiles.rebudget import rebudget
from calibrate.profiles.retile import retile
from calibrate.recipe import Budget
from calibrate.record import read_record
from calibrate.report import figures
from calibrate.report.page import render_card
from s2o_runtime.config import HeadConfig, StopRule
from s2o_runtime.identity import CONFIG
from s2o_runtime.profile import load_profile, save_profile
from s2o_runtime.profile.file import serialize
from s2o_runtime.profile.find import find_profiles
from support.artefacts import shared
from support.golden_profiles import field_paths, minimal, path_of
from support.pages import DEMO_PROFILE
from support.processes import called, refusal
from support.profiles import FORMAT, document_of

SLOW = pytest.mark.slow(reason="shares a whole calibration of the demo model")

FULL = path_of("schema8_lookback")
QUICK = "--model demo --device cpu --lengths 512 --num-prompts 1 --num-held-out 1 --trials 1 --segments 256"
QUICK += " --lookbacks 64 --tails off --keep-needles 0.8 --num-certify 3 --budget-rel-mse 1e-3 --quiet"


def calibrate_demo(folder):
    assert cli.main([*QUICK.split(), "--out", str(folder / "demo.safetensors")]) == 0


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """A certified profile with its report and journal beside it; tests do not change them."""
    return shared(tmp_path_factory, "demo-calibrated", calibrate_demo) / "demo.safetensors"


@pytest.fixture
def run(capsys):
    """Run a command; its exit code, and what it prints: parsed with --json."""

    def run(*arguments):
        capsys.readouterr()
        code = profile_cli.main(list(map(str, arguments)))
        printed = capsys.readouterr()
        run.stderr = printed.err
        if code != 0:
            assert printed.err.startswith("s2o-profile: ")
            assert printed.err.count("\n") == 1
            return code, printed.err
        return code, json.loads(printed.out) if "--json" in arguments else printed.out

    return run


@SLOW
def test_every_field_of_a_real_profile_is_in_the_format(calibrated, tmp_path):
    """Of a calibration, of a profile with another budget and of one with other tiles."""
    rebudget(calibrated, Budget("rel_mse", 1e-2), calibrated.with_name("other.safetensors"))
    retile(calibrated, "cpu", tmp_path / "retiled.safetensors")
    text = FORMAT.read_text(encoding="utf-8")
    for path in (calibrated, calibrated.with_name("other.safetensors"), tmp_path / "retiled.safetensors"):
        for field in field_paths(document_of(path.read_bytes())):
            known = re.sub(r"\.versions\..*", ".versions", re.sub(r"^model\.config\..*", "model.config", field))
            in_format = any(f"`{known}{end}" in text for end in ("`", "[]`", "[]."))  # the last for an empty list
            assert in_format, known


@SLOW
def test_show_says_what_was_proven(calibrated, run):
    profile = load_profile(calibrated)
    _, shown = run("show", calibrated, "--json")
    assert (shown["model"], shown["proof"], shown["budget"]) == ("demo", "held out", "rel_mse 0.001")
    (length,) = shown["lengths"]
    layers = read_record(profile).held_out[0].layers
    assert length["density"] == pytest.approx(sum(layer.density for layer in layers) / len(layers))
    assert length["error_over_limit"] == max(layer.rel_mse / layer.limit for layer in layers)
    assert length["dense_heads"] == sum(head.mode == "dense" for layer in profile.layers[0] for head in layer.heads)
    assert length["needles"] == [1, 1]
    for layer, eighths, places in zip(layers, length["layer_eighths"], length["layer_places"], strict=True):
        assert sum(eighths) / 8 == pytest.approx(layer.rel_mse / layer.limit, rel=0.3)  # whose outputs' sizes differ
        assert (max(eighths) <= 1.5, bool(places)) == (True, layer.rel_mse > 0)
    _, table = run("show", calibrated)
    for form, of_layers in ((".0%", length["layer_eighths"]), (".2g", length["layer_places"])):
        parts = " ".join(format(part, form) for part in max(filter(None, of_layers), key=max))
        assert re.search(rf"512 tokens: layer \d errs most by .*: {parts}\n", table)
    assert re.search(rf"{length['density']:.3f} +held out", table)
    assert "prompts below 512 tokens stay dense" in table


@pytest.mark.parametrize(
    "record", [{}, {"held_out": 3}, {"held_out": [7, {"length": 512, "layers": [None]}]}, {"budget": []}]
)
def test_show_takes_a_foreign_record(record, run, tmp_path):
    path = tmp_path / "p.safetensors"
    save_profile(dataclasses.replace(minimal(), model_name="\x1b[31mred\nname", record=record), path)
    code, text = run("show", path)
    assert (code, "\x1b" in text, "density" in text) == (0, False, True)


def test_a_profile_is_found_by_its_models_name(run, tmp_path, monkeypatch):
    """In profiles/ of the current folder; a file of that name comes first. Of the catalogue `show demo` tells below."""
    monkeypatch.chdir(tmp_path)
    save_profile(minimal(), tmp_path / "demo")
    assert run("show", "demo", "--json")[1]["fingerprint"] == minimal().fingerprint
    (tmp_path / "profiles" / "my-own").mkdir(parents=True)
    save_profile(minimal(), tmp_path / "profiles" / "my-own" / "p.safetensors")
    assert run("show", "My Own", "--json")[1]["fingerprint"] == minimal().fingerprint


@SLOW
def test_a_head_is_explained_by_its_curve(calibrated, run):
    """A head's curve says what the report says; what keeps it back follows from its points."""
    report = json.loads(calibrated.with_name("demo.report.json").read_text())
    rows = report["lengths"][0]["layers"]
    seen = set()
    for layer, head in product(range(len(rows)), range(8)):
        row, expected = rows[layer], rows[layer]["heads"][head]
        (length,) = run("show", calibrated, "--head", f"{layer}.{head}", "--json")[1]["lengths"]
        assert length["mode"] == expected["mode"]
        if row["why_dense"]:  # no point of a curve was chosen
            assert (length["density"], "its whole layer is" in length["why"]) == (None, True)
            continue
        assert [length[name] for name in ("density", "error")] == pytest.approx(
            [expected["density"], expected["error"]]
        )
        seen |= {phrase for phrase in ("guard on worst rows", "limited by the budget") if phrase in length["why"]}
        assert length["why"].startswith("dense because ") == (expected["mode"] == "dense")
    assert seen == {"guard on worst rows", "limited by the budget"}
    assert run("show", calibrated, "--head", "0.0")[1].startswith("512 tokens: ")


def test_show_counts_the_heads_that_only_earlier_versions_could_run(run):
    earlier = path_of("schema8")
    count = load_profile(earlier).unsupported_heads
    assert count > 10
    assert f"\ndense here: {count} heads, whose tail, grain, scores or representatives" in run("show", earlier)[1]
    assert run("show", earlier, "--json")[1]["unsupported_heads"] == count
    assert "dense here" not in run("show", FULL)[1]


def test_export_holds_everything(run, tmp_path):
    profile = load_profile(FULL)
    _, document = run("export", FULL)
    document = json.loads(document)
    assert document["record"] == profile.record
    assert document["lengths"] == list(profile.lengths)
    for bucket, layers in zip(document["buckets"], profile.layers, strict=True):
        expected = json.loads(json.dumps([dataclasses.asdict(layer) for layer in layers]))
        for head in (head for layer in expected for head in layer["heads"]):
            head["stop_rule"] = str(StopRule(head["stop_rule"]))  # the name, not the file's number
        assert bucket["layers"] == expected
    assert run("export", FULL, "--out", tmp_path / "p.json") == (0, f"wrote {tmp_path}/p.json\n")
    assert json.loads((tmp_path / "p.json").read_text()) == {"origin": MARK} | document


@pytest.mark.parametrize(
    ("arguments", "called", "out"),
    [
        ("rebudget --budget-mse 1e-3", "mse-0.001 OUT None None", "mse-0.001.safetensors"),
        ("rebudget --budget-mse 1 --ceiling-rel-mse none", "mse-1 OUT None None", "mse-1-ceiling-0.safetensors"),
        ("rebudget --budget-rel-mse 0.5 --worst-rows 0.8", "rel-mse-0.5 OUT None 0.8",
         "rel-mse-0.5-rows-0.8.safetensors"),
        ("rebudget --budget-mse 0.5 --worst-rows 0 --journal j --out b/q", "mse-0.5 OUT j 0.0", "b/q"),
        ("retile --device cpu", "cpu OUT", "p-cpu.safetensors"),
    ],
)  # fmt: skip
def test_flags_become_the_arguments_of_rebudget_and_retile(arguments, called, out, run, tmp_path, monkeypatch):
    command, *flags = arguments.split()
    call = Mock(return_value=dataclasses.replace(minimal(), record={"retiled": {"note": "tuned"}}))
    monkeypatch.setitem(sys.modules, f"calibrate.profiles.{command}", SimpleNamespace(**{command: call}))
    monkeypatch.chdir(tmp_path)
    assert run(command, "a/p.x", *flags) == (0, f"wrote {out}\n")
    assert " ".join(map(str, call.call_args.args)) == f"a/p.x {called.replace('OUT', out)}"


@SLOW
def test_verify_makes_the_proof_again(calibrated, run):
    """The same prompts, device and model give the same errors, to the bit on one machine or nearly."""
    code, proof = run("verify", calibrated, "--model", "demo", "--device", "cpu", "--json")
    assert (code, proof["problems"], proof["same_prompts"]) == (0, [], True)
    plan = dict(re.findall(r"^(\w[\w ]*?)  +(.*)$", run.stderr, re.M))
    assert re.fullmatch(r"at most about \d+ s \(loading the model \d+ s, proving \d+ s\)", plan["takes"])
    assert (plan["layers"], plan["lengths"]) == ("all 6 run S2O", "512")
    assert plan["prompts"].startswith("1 of each length, built-in code, ")
    assert re.search(r"^proving: 100% \(6 of 6 layers\), took ", run.stderr, re.M)
    (length,), (recorded,) = proof["lengths"], read_record(load_profile(calibrated)).held_out
    for layer, expected in zip(length["layers"], recorded.layers, strict=True):
        shown, stated = [layer["error"], layer["density"]], [expected.rel_mse, expected.density]
        assert (shown, layer["limit"]) == (pytest.approx(stated, rel=1e-2), expected.limit)
    assert tuple(length["needles"]) == recorded.needles
    answers = length["answers"]
    assert 0 <= answers["kl"] <= answers["worst_eighth"] < 0.1  # 0 where only the last layer errs
    assert (answers["second_turn"] < 0.1, answers["noise"]) == (True, None)


def test_a_folder_to_publish_has_all_profiles_of_a_model_under_its_name(run, tmp_path, monkeypatch):
    """And is found when its s2o/ is copied beside the model's weights. Each file is read once."""
    monkeypatch.setattr("s2o_runtime.profile.file._read_file", read := Mock(side_effect=Path.read_bytes))
    for kind in ("mse", "rel_mse"):
        record = {"budget": {"kind": kind, "value": 1e-3}, "recipe": {"model": "/home/me/model"}}
        profile = dataclasses.replace(minimal(), record=record, fingerprint=f"{'0' * 64}{CONFIG}{{}}")
        save_profile(profile, tmp_path / "p.safetensors")
        flags = ["--name", "org/model", "--out-dir", tmp_path / "to"]
        _, written = run("publish", tmp_path / "p.safetensors", *flags, "--json")
        assert len(written["files"]) == 3
    assert [path.stem for (path,), _ in read.call_args_list] == ["p", "p", "mse-0.001"]
    found = [candidate for candidate in find_profiles(tmp_path / "to") if tmp_path in candidate.path.parents]
    assert sorted(one.path.stem for one in found) == ["mse-0.001", "rel-mse-0.001"]
    assert {(one.profile.model_name, one.profile.record["recipe"]["model"]) for one in found} == {("org/model",) * 2}
    readme = (tmp_path / "to" / "README.md").read_text()
    assert yaml.safe_load(readme.split("---")[1])["base_model"] == "org/model"
    for one in found:
        card = one.path.with_suffix(".md")
        assert f"]({card.relative_to(tmp_path / 'to')}), proof: " in readme
        assert card.read_text() == render_card(one.profile, one.path.name)
    others = serialize(dataclasses.replace(profile, fingerprint=f"{'1' * 64}{CONFIG}{{}}"))
    for name, data, said in (
        ("rel-mse-0.001.md", b"mine", FOREIGN),
        ("broken.safetensors", b"", "broken.safetensors: its contents cannot be read"),
        ("of-others.safetensors", others, "is of another model (the weights are not those of "),
    ):
        (path := card.with_name(name)).write_bytes(data)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
        assert said in run("publish", tmp_path / "p.safetensors", *flags)[1]
        assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before
        path.unlink()


def careless(profile):
    """The same with heads that skip too much."""
    heads = (HeadConfig(1e6, 256),) * 8
    return dataclasses.replace(
        profile, layers=(tuple(dataclasses.replace(layer, heads=heads) for layer in profile.layers[0]),)
    )


def recorded(profile, recipe, **changes):
    """The same with other settings in its recipe, and another record."""
    return dataclasses.replace(profile, record=profile.record | {"recipe": profile.record["recipe"] | recipe} | changes)


@SLOW
@pytest.mark.parametrize(
    ("change", "seed", "code", "said"),
    [
        (careless, (), 3, r"the proof failed \(layer 0 at 512 tokens has an error of .* in an eighth .*, 1.50e-03 is"),
        # of fewer fresh prompts nothing is surely beyond chance
        (careless, ("--seed", 5, "--num-certify", 20), 3,
         r"the certificate does not hold \(layer . at 512 tokens: its mean error is"),
        (lambda profile: dataclasses.replace(profile, fingerprint="0" * 64), (), 2, "is not of demo: the weights are"),
        (lambda profile: minimal(), (), 2, "does not say how it was calibrated"),
        (lambda profile: recorded(profile, {"scope": "model"}), (), 2,
         "its budget is of all layers together, which this version does not have"),
    ],
    ids=["careless", "certificate", "weights", "recipe", "limits"],
)  # fmt: skip
def test_verify_refuses_what_does_not_hold_or_cannot_be_proven(change, seed, code, said, calibrated, run, tmp_path):
    save_profile(change(load_profile(calibrated)), tmp_path / "p.safetensors")
    flags = ["--model", "demo", "--device", "cpu", "--quiet", *seed]
    ended, sentence = run("verify", tmp_path / "p.safetensors", *flags)
    assert (ended, bool(re.search(said, sentence))) == (code, True), sentence


@SLOW
def test_verify_checks_the_certificate_on_other_prompts(calibrated, run):
    """On as many as are asked for; each one's values are there, with what they were measured of."""
    flags = ["--model", "demo", "--device", "cpu", "--seed", 5, "--num-certify", 4, "--json"]
    code, check = run("verify", calibrated, *flags)
    assert code == 0, check
    assert re.search("^prompts  4 of each length, built-in code, ", run.stderr, re.M)
    assert [check[name] for name in ("model", "profile", "device", "seed")] == ["demo", str(calibrated), "cpu", 5]
    (length,) = check["lengths"]
    assert (length["length"], length["prompts"], length["groups"], check["problems"]) == (512, 4, 4, [])
    assert (length["broken"], length["above"]) == (0, None)
    of_prompts = length["of_prompts"]
    assert sum(prompt["kl"] for prompt in of_prompts) / 4 == pytest.approx(length["mean_kl"])
    assert 0 < length["means"] <= max(prompt["error_over_limit"] for prompt in of_prompts) < 3
    assert len({prompt["group"] for prompt in of_prompts}) == 4


@SLOW
def test_verify_warns_of_prompts_from_files_that_the_profile_was_calibrated_on(calibrated, run, tmp_path, caplog):
    profile = recorded(load_profile(calibrated), {"prompts": ("mine.txt",), "domains": None})
    save_profile(profile, tmp_path / "p.safetensors")
    (tmp_path / "mine.txt").write_text("Too few words.")
    flags = ["--model", "demo", "--device", "cpu", "--quiet", "--seed", 5, "--prompts", tmp_path / "mine.txt"]
    assert run("verify", tmp_path / "p.safetensors", *flags)[0] == 2
    assert "was calibrated on mine.txt: another seed divides this text anew" in caplog.text


def test_without_a_gpu_retile_says_that_no_tiles_were_tuned(run, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    assert run("retile", FULL, "--device", "cpu") == (0, f"wrote {FULL.stem}-cpu.safetensors\n")
    assert "no tiles were tuned, because a CPU runs any" in caplog.text
    before, after = load_profile(FULL), load_profile(f"{FULL.stem}-cpu.safetensors")
    assert (after.layers, after.device.kind) == (before.layers, "cpu")
    retiled = read_record(after).retiled
    assert (retiled.timed, retiled.dense_layers, retiled.note in caplog.text) == ((), 0, True)


@SLOW
def test_a_card_says_what_was_proven_of_its_profile(calibrated, run, tmp_path):
    """Of a calibration and after rebudget: in Markdown and in HTML, with what the record has of each layer."""
    rebudget(calibrated, Budget("rel_mse", 1e-2), calibrated.with_name("card.safetensors"))
    for profile in (calibrated, calibrated.with_name("card.safetensors")):
        _, written = run("card", profile, "--out-dir", tmp_path / "to", "--json")
        text, page = (Path(file).read_text() for file in written["files"])
        assert text == render_card(load_profile(profile), profile.name)
        assert f's2o_runtime.patch(model, "{profile.name}")' in text
        claims = "**Certified on 3 prompts of each length, of 3 groups", "within rel_mse 0.001"
        assert [claim in text for claim in claims] == [profile == calibrated] * 2
        assert '<h1 id="s2o-profile-of-demo">S2O profile of demo</h1>' in page
        assert (page.count("<svg"), page.count('<th scope="col" class="r">tile</th>')) == (1, 1)  # one length
        assert ("**Not proven** (" in text, "<strong>Not proven</strong> (" in page) == (profile != calibrated,) * 2
        assert ("densities held out" in page) == (profile == calibrated)


def test_a_picture_that_cannot_be_drawn_takes_no_card_away(run, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(figures, "_save_figure", lambda *_, **options: int(float("inf")))
    assert run("card", FULL, "--out-dir", tmp_path)[0] == 0
    assert "<svg" not in (tmp_path / f"{FULL.stem}.html").read_text()
    assert "the pictures cannot be drawn (OverflowError: cannot convert float infinity to integer)" in caplog.text


FOREIGN = "exists and was not written by S2O, so it is not replaced: give another file name, or move it away"
IS_INPUT = "is an input, so it is not replaced: give another file name"
IS_PROFILE, IS_REPORT = "exists and is an S2O profile", "exists and is a report or a picture of S2O"
INPUTS = (("p.safetensors", IS_INPUT), ("link", IS_INPUT), ("mine", FOREIGN), ("p.json", IS_REPORT))
OTHERS = (("p.safetensors", IS_INPUT), ("other.safetensors", IS_PROFILE), ("mine.png", FOREIGN))


@pytest.mark.parametrize(
    ("arguments", "target", "sentence"),
    [
        *(("rebudget p.safetensors --budget-mse 1e-3 --out", file, said) for file, said in INPUTS),
        *(("retile p.safetensors --device cpu --out", file, said) for file, said in INPUTS),
        *(("export p.safetensors --out", file, said) for file, said in OTHERS),
        *(("plot p.safetensors --out", file, said) for file, said in OTHERS),
        ("card p.safetensors", "p.md", FOREIGN),
        ("card p.safetensors --out-dir to", "to/p.html", FOREIGN),
        ("plot p.safetensors", "p.tau.png", FOREIGN),
        ("plot p.safetensors --out", "p.xyz", "is not named as a picture: give a name that ends in .png"),
    ],
)
def test_an_output_replaces_nothing_that_must_stay(arguments, target, sentence, run, tmp_path, monkeypatch):
    """An input, a profile by something else, or a file that another program wrote; nothing is computed before."""
    monkeypatch.chdir(tmp_path)
    Path("to").mkdir()
    for name in ("p", "other"):
        save_profile(minimal(), f"{name}.safetensors")
    Path("link").symlink_to("p.safetensors")
    assert run("export", "other.safetensors", "--out", "p.json")[0] == 0
    for name in ("mine", "mine.png", "p.md", "to/p.html", "p.tau.png"):
        Path(name).write_text("mine, about S2O")
    monkeypatch.setitem(sys.modules, "s2o_runtime.profile.file", None)  # nothing is read before
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    code, said = run(*arguments.split(), *([target] if arguments.endswith("--out") else []))
    assert (code, sentence in said, target in said) == (2, True, True), said
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_what_it_wrote_itself_is_replaced(run, tmp_path, monkeypatch):
    """Also an empty file, which holds nothing, and a file at the end of a link, even if there is none yet."""
    monkeypatch.chdir(tmp_path)
    Path("empty.png").touch()
    Path("link.json").symlink_to("p.json")
    for _ in range(2):
        for out in ("p.tau.png", "empty.png"):
            assert run("plot", FULL, "--out", out)[0] == 0
        for out in ("link.json", "p.json"):
            assert run("export", FULL, "--out", out)[0] == 0
        assert run("retile", FULL, "--device", "cpu", "--out", "new.safetensors")[0] == 0
        assert run("card", FULL)[0] == 0
    assert (Path("link.json").is_symlink(), Path("p.json").is_symlink()) == (True, False)


BAD_INPUT = [
    ("show ~/none.safetensors", f"{Path.home()}/none.safetensors cannot be read (No such file or directory)"),
    ("show FULL --head 3", "'3' is not a layer and a head: try 3.7"),
    ("show FULL --head 0.4", "head 0.4 does not exist: layers are 0 to 1, heads 0 to 3"),
    ("show demo", "demo has 4 profiles: name one of /"),
    ("shw FULL", "did you mean show?"),
    ("verify FULL", "verify needs the profile's model: give --model MODEL"),
    (f"verify {DEMO_PROFILE} --model qwen2.5-7b --device cpu", "is not of qwen2.5-7b, which has "),
    (
        f"rebudget {DEMO_PROFILE} --budget-kl 1e-3 --out new/p.safetensors",
        "curves: run s2o-calibrate --model demo --budget-kl 0.001 --lengths 1024,2048",
    ),
    ("verify mse-1.safetensors --model demo --device cpu --seed 5", "is not certified"),
    (f"verify {DEMO_PROFILE} --model demo --device cpu --seed 0", "was made with seed 0, expected fresh prompts: give"),
    (f"verify {DEMO_PROFILE} --model demo --seed 1 --num-certify 9999999", "num_certify is 9999999: expected a whole"),
    ("verify FULL --model demo --num-certify 64", "num_certify is of fresh prompts, which no seed draws"),
    ("rebudget FULL", "needs the new budget: give --budget-mse or --budget-rel-mse"),
    ("rebudget FULL --budget-rel-mse 1e-2 --ceiling-rel-mse 1e-3", "ceiling_rel_mse 0.001 goes with"),
    ("publish FULL --name org/model --out-dir to", "was calibrated on random weights"),
    ("publish mse-1.safetensors --out-dir to", "is not the hub id of a model, which its profile is"),
    ("publish mse-1.safetensors --out-dir=", "argument --out-dir: '': expected a file name"),
    ("retile mse-1.safetensors --device cpu", "mse-1-cpu.safetensors is beside weights, as which loaders read it: "),
    ("verify mse-1.safetensors --model demo --chunk 0", "chunk is 0: expected a whole number of tokens from 64 to "),
    ("verify mse-1.safetensors --model demo --prompts none", "prompt file none cannot be read (No such file or "),
    ("publish mse-1.safetensors --name org/model --out-dir to", "does not say what its budget is"),
    ("plot FULL --out none/p.png", "cannot be written or read (No such file or directory)"),
    ("card FULL --shelf", "unrecognized arguments: --shelf"),
    ("", "the following arguments are required: COMMAND"),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD_INPUT, ids=lambda text: text[:30])
@pytest.mark.usefixtures("offline")
def test_errors_are_one_sentence(arguments, sentence, tmp_path):
    save_profile(minimal(), tmp_path / "mse-1.safetensors")
    (tmp_path / "config.json").touch()
    outcome = called(profile_cli.main, *arguments.replace("FULL", str(FULL)).split(), cwd=tmp_path)
    assert sentence in refusal(outcome, "s2o-profile")
