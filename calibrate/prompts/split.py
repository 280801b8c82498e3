"""The user's documents, split by group into those to calibrate, to adjust and to certify on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from calibrate.prompts.documents import CALIBRATION, CERTIFY, HELD_OUT, PURPOSES, Document

Kind = tuple[str, bool]  # what is joined: documents of one domain, and conversations apart from plain text
Split = dict[str, list[Document]]


def split(
    documents: Sequence[Document],
    size: Callable[[Document], int],
    wanted: Mapping[int, Mapping[str, int]],
    rng: random.Random,
) -> Split:
    """Share documents out so that the prompts of every length are there, as far as the documents go.

    The longest length is served first, and a group stays where it was put, so it has one purpose at all lengths. At
    each length one prompt to calibrate and one to adjust on come first, then the others of these two, then those to
    certify on, each of another group if there are enough, because a certificate counts groups. Groups with a document
    as long as the prompt go before those that must be joined.

    Args:
        documents: all of them.
        size: a document's tokens.
        wanted: for each length in tokens, how many prompts each purpose is to have.
        rng: what draws the order of the groups.

    Returns:
        Each purpose's documents, in the order in which they make prompts.
    """
    groups: dict[str, list[Document]] = {}
    for document in documents:
        groups.setdefault(document.group, []).append(document)
    free = rng.sample(sorted(groups), len(groups))
    shared: Split = {purpose: [] for purpose in PURPOSES}
    for length in sorted(wanted, reverse=True):
        tallies = {purpose: _Tally(length, size, shared[purpose]) for purpose in PURPOSES}
        for whole in (True, False):
            if whole:
                candidates = [name for name in free if any(size(document) >= length for document in groups[name])]
            else:
                candidates = list(free)
            while candidates:
                purpose = _next(tallies, wanted[length])
                if purpose is None:
                    break
                name = tallies[purpose].rarest(candidates, groups)
                candidates.remove(name)
                free.remove(name)
                shared[purpose] += groups[name]
                tallies[purpose].add(groups[name])
    return shared


def parts(documents: Iterable[Document], size: Callable[[Document], int], length: int) -> Iterator[list[Document]]:
    """What makes a prompt each: a document of at least `length` tokens, or several of one kind that reach it."""
    tally = _Tally(length, size, ())
    for document in documents:
        yield from tally.add([document])


def _next(tallies: Mapping[str, _Tally], wanted: Mapping[str, int]) -> str | None:
    """The purpose that gets the next group, None if all have what they want."""
    have = {purpose: tally.prompts for purpose, tally in tallies.items()}
    both = [purpose for purpose in (CALIBRATION, HELD_OUT) if have[purpose] < wanted[purpose]]
    if both:
        return min(both, key=lambda purpose: (have[purpose] > 0, have[purpose] / wanted[purpose]))
    return CERTIFY if len(tallies[CERTIFY].groups) < wanted[CERTIFY] else None


class _Tally:
    """How many prompts of a length documents make."""

    def __init__(self, length: int, size: Callable[[Document], int], documents: Iterable[Document]) -> None:
        self._length, self._size = length, size
        self._open: dict[Kind, list[Document]] = {}
        self._tokens: dict[Kind, int] = {}
        self._of_domain: dict[str, int] = {}
        self.prompts = 0
        self.groups: set[str] = set()  # that a prompt begins with
        self.add(documents)

    def add(self, documents: Iterable[Document]) -> list[list[Document]]:
        """The prompts that further documents complete."""
        completed = []
        for document in documents:
            kind = document.domain, bool(document.turns)
            tokens = self._size(document)
            if tokens >= self._length:
                completed.append([document])
            else:
                self._open.setdefault(kind, []).append(document)
                self._tokens[kind] = self._tokens.get(kind, 0) + tokens
                if self._tokens[kind] < self._length:
                    continue
                completed.append(self._open.pop(kind))
                self._tokens[kind] = 0
            self._of_domain[document.domain] = self._of_domain.get(document.domain, 0) + 1
        self.prompts += len(completed)
        self.groups.update(prompt[0].group for prompt in completed)
        return completed

    def rarest(self, candidates: Sequence[str], groups: Mapping[str, Sequence[Document]]) -> str:
        """The first candidate group of the domain that has the fewest prompts."""
        return min(candidates, key=lambda name: self._of_domain.get(groups[name][0].domain, 0))
