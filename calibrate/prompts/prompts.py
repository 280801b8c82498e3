"""The prompts of a calibration, in three sets that share no text."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any

from calibrate.prompts.assembly import TooShortError, assembled, in_equal_parts, size_of
from calibrate.prompts.documents import (
    CALIBRATION,
    CERTIFY,
    FOUND,
    HELD_OUT,
    PURPOSES,
    Document,
    Supply,
    distinct,
    found_documents,
    read_documents,
)
from calibrate.prompts.prompt import Prompt, PromptSet
from calibrate.recipe import Recipe
from s2o_runtime.errors import InputError
from s2o_runtime.fields import counted

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


FEW_PROMPTS = 4  # fewer to calibrate on say little about others
WORDS = {CALIBRATION: "to calibrate on", HELD_OUT: "to adjust on", CERTIFY: "to certify on"}

log = logging.getLogger("calibrate")


def load_prompts(recipe: Recipe, tokenizer: Any) -> PromptSet:
    """The recipe's prompts: the user's, or the built-in ones.

    The same recipe and tokenizer give the same prompts, as long as the documents are the same: the built-in code is the
    Python standard library's, which changes with Python.

    Args:
        recipe: the lengths, how many prompts of each, the documents and the seed.
        tokenizer: the model's tokenizer.

    Raises:
        InputError: A prompt file is bad, or the documents are too few or too short to calibrate and adjust on.
    """
    wanted = {
        length: {
            CALIBRATION: recipe.num_prompts if length in recipe.lengths else 0,
            HELD_OUT: recipe.held_out,
            CERTIFY: recipe.num_certify,
        }
        for length in (*recipe.lengths, *recipe.checked_lengths)
    }
    if recipe.prompts is not None:
        prompts = _of_files(recipe, tokenizer, wanted)
    else:
        prompts = _built_in(recipe, tokenizer, wanted)
    for length, numbers in wanted.items():
        counts = {purpose: len(getattr(prompts, purpose).get(length, ())) for purpose in PURPOSES}
        if counts != numbers:
            log.warning(
                "%s has prompts of %d tokens for %s where %s were asked for: add documents",
                recipe.prompt_source,
                length,
                ", ".join(f"{counts[purpose]} {WORDS[purpose]}" for purpose in PURPOSES),
                ", ".join(map(str, numbers.values())),
            )
    fewest = min(map(len, prompts.calibration.values()))
    if fewest < FEW_PROMPTS:
        log.warning(
            "%s to calibrate on can say little about others: use %d or more (--num-prompts)",
            counted(fewest, "prompt"),
            FEW_PROMPTS,
        )
    return prompts


def _built_in(recipe: Recipe, tokenizer: Any, wanted: Mapping[int, Mapping[str, int]]) -> PromptSet:
    """Prompts of the kinds in turns; fewer prompts than kinds have several each, in equal parts.

    Where a kind's text is used up the others follow it, and a prompt is of the kind that most of it is. If no other was
    asked for, there are fewer prompts.
    """
    kinds = recipe.used_domains
    used_up: set[str] = set()
    for kind in FOUND:
        found_documents(kind)  # read once, not by each thread

    def prompts_of(purpose: str, length: int) -> list[Prompt]:
        rng = random.Random(f"{recipe.seed}/{length}/{purpose}")
        supply = Supply(purpose, rng)
        count = wanted[length][purpose]
        prompts: dict[int, Prompt] = {}
        for number in sorted(range(count), key=lambda number: number % len(kinds)):  # what is composed takes the rest
            own = kinds[number::count] if count < len(kinds) else (kinds[number % len(kinds)],)
            order = [*rng.sample(own, len(own)), *(kind for kind in kinds if kind not in own)]
            drawn = [supply.drawn(kind) for kind in order]
            parts = [*drawn[: len(own) - 1], chain.from_iterable(drawn[len(own) - 1 :])]
            documents = in_equal_parts(tokenizer, parts, length)
            try:
                prompt = assembled(
                    tokenizer, documents, length, rng, needles=recipe.hide_needles, isolated="questions" in own
                )
            except TooShortError:
                break
            prompts[number] = replace(prompt, domain="+".join(own)) if len(own) > 1 else prompt
        if count and not prompts and purpose != CERTIFY:
            raise InputError(
                f"{recipe.prompt_source} is too short for a prompt {WORDS[purpose]} of {length} tokens: "
                "name more kinds, such as json, or use a shorter length"
            )
        used_up.update(f"{kind} at {length}" for kind in supply.used_up.intersection(kinds))
        return [prompts[number] for number in sorted(prompts)]

    prompts = _set_of(wanted, prompts_of)
    if used_up:
        log.warning(
            "the built-in text of %s is used up: nothing is repeated, other kinds take its place",
            ", ".join(sorted(used_up)),
        )
    return prompts


def _of_files(recipe: Recipe, tokenizer: Any, wanted: Mapping[int, Mapping[str, int]]) -> PromptSet:
    sizes: dict[bytes, int] = {}

    def size(document: Document) -> int:
        if document.digest not in sizes:
            sizes[document.digest] = size_of(tokenizer, document)
        return sizes[document.digest]

    read = read_documents(recipe.prompts or ())
    documents = distinct(read)
    if len(documents) < len(read):
        log.info("%d of %d documents occur before and are left out", len(read) - len(documents), len(read))
    shared = split(documents, size, wanted, random.Random(recipe.seed))
    cut: set[bytes] = set()

    def prompts_of(purpose: str, length: int) -> list[Prompt]:
        rng = random.Random(f"{recipe.seed}/{length}/{purpose}")
        chosen = _in_turns(parts(shared[purpose], size, length))[: wanted[length][purpose]]
        if wanted[length][purpose] and not chosen and purpose != CERTIFY:
            raise InputError(_too_few(recipe.prompt_source, documents, max(map(size, documents)), purpose, length))
        cut.update(part[-1].digest for part in chosen if sum(map(size, part)) > length)
        return [assembled(tokenizer, iter(part), length, rng, needles=recipe.hide_needles) for part in chosen]

    prompts = _set_of(wanted, prompts_of)
    if cut:
        log.info("%d documents are longer than their prompts: what is beyond the length is left out", len(cut))
    return prompts


def _too_few(source: str, documents: Sequence[Document], longest: int, purpose: str, length: int) -> str:
    """The sentence on files that give no prompt for a purpose at a length in tokens. longest: a document's tokens."""
    groups, count = len({document.group for document in documents}), counted(len(documents), "different document")
    if groups == 1:
        unit = "document" if len(documents) == 1 else "group"
        remedy = (
            f"this is one {unit}, and no two sets share one, so give at least two {unit}s of {length} tokens or more, "
            "or split the text into lines of a .jsonl file"
        )
    else:
        remedy = "at least 1 must be, add longer prompts of other groups or use a shorter length"
    return (
        f"{source} has 0 prompts {WORDS[purpose]} of {length} tokens or more ({count} in {counted(groups, 'group')}, "
        f"the longest of {longest} tokens): {remedy}"
    )


def _in_turns(chosen: Iterable[list[Document]]) -> list[list[Document]]:
    """The parts with their domains in turns, and in each domain its groups: the first few are of many groups."""
    domains: dict[str, dict[str, list[list[Document]]]] = {}
    for part in chosen:
        domains.setdefault(part[0].domain, {}).setdefault(part[0].group, []).append(part)
    return _round_robin([_round_robin(list(groups.values())) for groups in domains.values()])


def _round_robin(lists: Sequence[list[list[Document]]]) -> list[list[Document]]:
    return [part for row in zip_longest(*lists) for part in row if part is not None]


def _set_of(wanted: Mapping[int, Mapping[str, int]], prompts_of: Callable[[str, int], list[Prompt]]) -> PromptSet:
    """The prompts of every purpose and length, made beside one another: tokenizers leave Python's lock."""
    with ThreadPoolExecutor() as threads:
        pending = {
            (purpose, length): threads.submit(prompts_of, purpose, length)
            for length in sorted(wanted, reverse=True)  # the longest take longest
            for purpose in reversed(PURPOSES)
            if wanted[length][purpose] or purpose == HELD_OUT
        }
        calibration, held_out, certify = (
            {length: pending[purpose, length].result() for length in wanted if (purpose, length) in pending}
            for purpose in PURPOSES
        )
    return PromptSet(calibration=calibration, held_out=held_out, certify=certify)
