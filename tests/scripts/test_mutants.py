"""scripts/mutants.py: every mutant can be applied, and a survivor is one."""

import pytest

from scripts import mutants
from scripts.mutants import FAILED, MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_it_fits_the_sources_of_today(mutant):
    text = (ROOT / mutant.path).read_text(encoding="utf-8")
    changed = mutant.applied(text)
    assert changed != text
    compile(changed, mutant.path, "exec")
    assert (ROOT / mutant.tests[0]).is_file()


def test_names_are_unique():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_one_that_no_longer_fits_says_so():
    mutant = Mutant("a limit", "a.py", "<=", "<", ("tests/test_a.py",))
    assert mutant.applied("x <= y") == "x < y"
    for text in ("x == y", "x <= y <= z"):
        said = f"'<=' {text.count('<=')} times, expected one: bring the mutant up to date"
        with pytest.raises(ValueError, match=said):
            mutant.applied(text)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """One module with a limit, and tests of which one looks at the limit itself."""
    tests = "from limited import fits\n\n\ndef test_{name}():\n    assert fits({value})\n"
    (tmp_path / "limited.py").write_text("def fits(x):\n    return x <= 3\n")
    for name, value in (("edge", 3), ("inside", 1)):
        (tmp_path / f"test_{name}.py").write_text(tests.format(name=name, value=value))
    return tmp_path


@pytest.mark.exhaustive(reason="starts pytest several times")
def test_a_mutant_is_killed_by_a_test_that_fails_and_by_nothing_else(project, capsys):
    for name, killed in (("edge", True), ("inside", False), ("missing", False)):
        mutant = Mutant("a limit", "limited.py", "<= 3", "< 3", (f"test_{name}.py",))
        assert mutants._is_killed(project, mutant) == killed
    edge, inside, missing = capsys.readouterr().out.splitlines()
    assert edge.startswith("limited.py: a limit: killed by test_edge, ")
    assert inside.startswith("limited.py: a limit: SURVIVES (")
    assert missing.startswith("limited.py: a limit: SURVIVES (")  # no test ran
    assert (project / "limited.py").read_text() == "def fits(x):\n    return x <= 3\n"
    assert mutants.run_tests(project, ["test_edge.py"])[0] == 0
    (project / "limited.py").write_text("def fits(x):\n    return False\n")
    assert mutants.run_tests(project, ["test_edge.py"])[0] == FAILED
