"""Documents split into three sets: whatever there is of them, each is in one set, with all of its group."""

import random

from hypothesis import given
from hypothesis import strategies as st

from calibrate.prompts.documents import CALIBRATION, CERTIFY, HELD_OUT, Document
from calibrate.prompts.split import split

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
