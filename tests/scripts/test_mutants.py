"""scripts/mutants.py: every mutant can be applied, and a survivor is one."""

import pytest

from scripts.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_it_fits_the_sources_of_today(mutant):
    text = (ROOT / mutant.path).read_text(encoding="utf-8")
    changed = mutant.applied(text)
    assert changed != text
    compile(changed, mutant.path, "exec")
    assert (ROOT / mutant.tests[0]).is_file()


def test_one_that_no_longer_fits_says_so():
    mutant = Mutant("a limit", "a.py", "<=", "<", ("tests/test_a.py",))
    assert mutant.applied("x <= y") == "x < y"
    for text in ("x == y", "x <= y <= z"):
        with pytest.raises(ValueError, match=f"'<=' {text.count('<=')} times, expected one"):
            mutant.applied(text)
