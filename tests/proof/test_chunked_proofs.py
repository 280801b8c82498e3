"""--chunk reaches everything that proves: the search in KL, the proof, the certificate, and both made again."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from calibrate import pipeline
from calibrate.commands.profile import main as profile_command
from calibrate.pipeline import calibrate
from calibrate.proof import adjust, again, certify, kl
from calibrate.proof.adjust import Proven, prove_and_tighten
from calibrate.proof.certify import proven_again, with_dense
from calibrate.proof.sample import sample
from calibrate.proof.verify import prove
from support.candidates import LENGTHS, candidate, proofs_of
from support.tiny import recipe, save_tiny

CHUNK, OTHER = 256, 128  # of the recipe, and of who proves it again
SETTINGS = {"lengths": (512,), "budget_kl": 5e-4, "num_certify": 3, "trials": 2, "num_held_out": 2}


class Chunks(dict):
    """The chunks that each module's proofs were called with, by the module's name."""

    def watch(self, monkeypatch, module, name, function):
        """Keep those of a function that a module calls."""
        place = f"{module.__name__.rpartition('.')[2]}.{name}"

        def watched(*arguments, **named):
            given = named["chunk"] if "chunk" in named else arguments[6]  # of `sample`, as the certificate calls it
            self.setdefault(place, set()).add(given)
            return function(*arguments, **named)

        monkeypatch.setattr(module, name, watched)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A calibration with chunks: the profile, the model's folder and what proved with which chunks."""
    folder = save_tiny(tmp_path_factory.mktemp("tiny") / "model")
    made = recipe(folder, tmp_path_factory.mktemp("calibrated") / "p.safetensors", **SETTINGS, chunk=CHUNK)
    chunks = Chunks()
    with pytest.MonkeyPatch.context() as monkeypatch:
        chunks.watch(monkeypatch, kl, "prove", prove)
        chunks.watch(monkeypatch, adjust, "prove", prove)
        monkeypatch.setattr(pipeline, "prove_and_tighten", partial(prove_and_tighten, prove=adjust.prove))
        chunks.watch(monkeypatch, certify, "sample", sample)
        calibrate(made, progress=False)
    return made.out, folder, chunks


def test_a_calibration_proves_in_the_recipes_chunks(finished):
    _, _, chunks = finished
    assert chunks == {"kl.prove": {CHUNK}, "adjust.prove": {CHUNK}, "certify.sample": {CHUNK}}


def test_what_changed_since_the_proof_is_measured_in_chunks(monkeypatch):
    begun = candidate()
    begun = replace(begun, recipe=replace(begun.recipe, chunk=CHUNK))
    proven, chunks = Proven(begun, proofs_of(begun), ()), Chunks()
    changed = replace(proven, candidate=with_dense(begun, frozenset({LENGTHS[0]})))
    measured = proofs_of(begun)[LENGTHS[0]]
    chunks.watch(monkeypatch, certify, "prove", lambda *_, **__: (None, {LENGTHS[0]: measured}))
    executor = SimpleNamespace(geometry=begun.geometry)
    proven_again(executor, {LENGTHS[0]: []}, proven, changed, progress=False)
    assert chunks == {"certify.prove": {CHUNK}}


@pytest.mark.parametrize(
    ("fresh", "place", "given"), [((), "again.prove", None), (("--seed", "5"), "again.sample", OTHER)]
)
def test_verify_proves_in_chunks(finished, fresh, place, given, monkeypatch, capsys):
    path, folder, _ = finished
    chunks = Chunks()
    chunks.watch(monkeypatch, again, "prove", prove)
    chunks.watch(monkeypatch, again, "sample", sample)
    option = () if given is None else ("--chunk", str(given))
    code = profile_command(["verify", str(path), "--model", str(folder), "--device", "cpu", *fresh, *option])
    assert code in (0, 3), capsys.readouterr().err  # in other chunks than those of the proof it may fail
    assert chunks == {place: {given or CHUNK}}
