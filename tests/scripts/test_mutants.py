"""scripts/mutants.py: every mutant can be applied, and a survivor is one."""

import pytest

from scripts.mutants import MUTANTS, ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_it_fits_the_sources_of_today(mutant):
    assert mutant.before != mutant.after
    changed = mutant.applied((ROOT / mutant.path).read_text(encoding="utf-8"))
    compile(changed, mutant.path, "exec")
    assert (ROOT / mutant.tests[0]).is_file()
