"""Every error says what was found, what was expected and what to do; docs/errors.md shows them as they are."""

import re

import pytest

from s2o_runtime import S2OError
from scripts.docs import errors
from scripts.docs.error_cases import CASES

# messages whose advice is not in the statement itself, and why that is right
INTERNAL = "a layer without a profile has no configuration for … keys"  # no user's call gets there
ADVICE = re.compile(r": |, expected | expected ")


@pytest.fixture(scope="module")
def tour():
    return errors.tour()


def test_the_page_is_what_the_code_says(tour):
    """If this fails: python -m scripts.docs.errors."""
    assert errors.PAGE.read_text(encoding="utf-8") == errors.page(tour)


def test_every_message_is_a_sentence_with_what_was_found_and_what_to_do(tour):
    provoked = [one for cases in tour.values() for one in cases]
    assert len(provoked) == sum(map(len, CASES.values())) >= 120
    for one in provoked:
        assert "\n" not in one.message, one
        assert not one.message.endswith("."), one
        assert ADVICE.search(one.message), one
        found, _, advice = one.message.partition(": ")
        assert found.strip(), one
        assert advice.strip() or "expected" in found, one
        assert one.code == (4 if one.error == "ResourceError" else 2), one


def test_every_statement_that_raises_has_such_a_message():
    known = errors.sites()
    assert len(known) > 250
    without = [site for site in known if site.template is not None and not ADVICE.search(f"{site.template} ")]
    assert [site.template for site in without] == [INTERNAL]


def test_most_statements_that_a_user_can_reach_are_provoked(tour):
    reached = {(one.site.file, one.site.first) for cases in tour.values() for one in cases if one.site}
    assert len(reached) >= 110


def test_a_case_that_raises_nothing_is_a_mistake():
    with pytest.raises(RuntimeError, match="raises no error: correct the case"):
        errors.provoke("1 + 1", {}, [])
    with pytest.raises(RuntimeError, match="correct the case"):
        errors.provoke("s2o-profile show " + str(errors.ROOT / "profiles/demo/cpu/mse-0.0001.safetensors"), {}, [])


def test_a_statement_is_found_by_its_lines():
    def raising():
        from s2o_runtime.tiles import padded_head_dim

        padded_head_dim(1000)

    known = errors.sites()
    with pytest.raises(S2OError) as caught:
        raising()
    site = errors._site_of(caught.value, known)
    assert (site.file, site.error) == ("s2o_runtime/tiles.py", "InputError")
    assert site.template.startswith("head_dim … is larger than …")
    assert errors._code("a `b`") == "`` a `b` ``"
