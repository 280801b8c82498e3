"""--chunk reaches everything that proves: the search in KL, the proof, the certificate, and both made again."""

import pytest

from calibrate.commands.profile import main as profile_command
from calibrate.pipeline import calibrate
from calibrate.proof import again, certify, verify
from calibrate.proof.sample import sample
from calibrate.proof.verify import prove
from support.tiny import recipe, save_tiny

CHUNK, OTHER = 256, 128  # of the recipe, and of who proves it again
SETTINGS = {"lengths": (512,), "budget_kl": 5e-4, "num_certify": 3, "trials": 2, "num_held_out": 2}


class Chunks(dict):
    """The chunks that each module's proofs were called with, by the module's name."""

    def watch(self, monkeypatch, module, name, function):
        """Keep those of a function that a module calls."""
        place = f"{module.__name__.rpartition('.')[2]}.{name}"

        def watched(*arguments, **named):
            given = named["chunk"] if "chunk" in named else arguments[6]  # of `prove`, as `Prover` calls it
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
        chunks.watch(monkeypatch, verify, "prove", prove)
        chunks.watch(monkeypatch, certify, "sample", sample)
        calibrate(made, progress=False)
    return made.out, folder, chunks


def test_a_calibration_proves_in_the_recipes_chunks(finished):
    _, _, chunks = finished
    assert chunks == {"verify.prove": {CHUNK}, "certify.sample": {CHUNK}}  # the passes in KL and the proof


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
