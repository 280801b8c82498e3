"""Documents split into three sets: whatever there is of them, each is in one set, with all of its group."""

import random

from hypothesis import given
from hypothesis import strategies as st

from calibrate.prompts.documents import CALIBRATION, CERTIFY, HELD_OUT, Document
from calibrate.prompts.prompts import _take_turns, make_parts, split

documents = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.integers(1, 900)), max_size=14
)  # domain, group, tokens
counts = st.fixed_dictionaries({purpose: st.integers(1, 4) for purpose in (CALIBRATION, HELD_OUT, CERTIFY)})


@given(documents, st.dictionaries(st.sampled_from([100, 300, 800]), counts, min_size=1), st.integers(0, 3))
def test_every_document_is_in_one_set_at_most_with_all_of_its_group(made, wanted, seed):
    """Also where there are too few, and a group is looked at as a whole prompt first and as a part of one later."""
    all_documents = [
        Document(domain, f"{domain}{group}", text=f"{number}:" + "x" * size)
        for number, (domain, group, size) in enumerate(made)
    ]
    shared = split(all_documents, lambda document: len(document.text), wanted, random.Random(seed))
    used = [document for of_purpose in shared.values() for document in of_purpose]
    assert len(used) == len(set(used))
    assert set(used) <= set(all_documents)
    groups = [{document.group for document in of_purpose} for of_purpose in shared.values()]
    assert sum(map(len, groups)) == len(set().union(*groups))
    for of_purpose, own in zip(shared.values(), groups, strict=True):
        assert set(of_purpose) == {document for document in all_documents if document.group in own}


def test_a_group_of_many_documents_does_not_take_the_place_of_other_groups_to_certify_on():
    """Whichever order the groups are drawn in."""
    many = [Document("notes", "folder", text=f"{number}" + "x" * 100) for number in range(20)]
    others = [Document("notes", f"file {number}", text=f"{number}" + "y" * 100) for number in range(5)]
    wanted = {100: {CALIBRATION: 1, HELD_OUT: 1, CERTIFY: 4}}
    for seed in range(8):
        shared = split([*many, *others], lambda document: len(document.text), wanted, random.Random(seed))
        groups = {document.group for document in shared[CERTIFY]}
        assert len(groups) == 4
        turns = _take_turns(make_parts(shared[CERTIFY], lambda document: len(document.text), 100))
        assert {part[0].group for part in turns[:4]} == groups
