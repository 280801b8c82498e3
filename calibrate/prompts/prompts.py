"""The prompts of a calibration, in three sets that share no text."""

from __future__ import annotations

import logging
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from itertools import chain, zip_longest
from typing import Any

from calibrate.prompts.assembly import assemble_prompt, count_tokens, mix_equal_parts
from calibrate.prompts.documents import (
    CALIBRATION,
    CERTIFY,
    FOUND,
    HELD_OUT,
    PURPOSES,
    Document,
    DocumentPool,
    TooShortError,
    drop_duplicates,
    read_documents,
    read_found_documents,
)
from calibrate.prompts.prompt import Prompt, PromptSet
from calibrate.recipe import Recipe
from s2o_runtime.errors import InputError
from s2o_runtime.fields import pluralize

Split = dict[str, list[Document]]  # by purpose


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
        size: returns a document's tokens.
        wanted: for each length in tokens, the number of prompts of each purpose.
        rng: draws the order of the groups.

    Returns:
        Each purpose's documents, in the order in which they make prompts.
    """
    groups: dict[str, list[Document]] = defaultdict(list)
    for document in documents:
        groups[document.group].append(document)
    free = rng.sample(sorted(groups), len(groups))
    shared: Split = {purpose: [] for purpose in PURPOSES}
    for length in sorted(wanted, reverse=True):
        tallies = {purpose: _Tally(length, size, shared[purpose]) for purpose in PURPOSES}
        for long_only in (True, False):
            candidates = [
                name for name in free if not long_only or any(size(document) >= length for document in groups[name])
            ]
            while candidates and (purpose := _choose_purpose(tallies, wanted[length])) is not None:
                by_domain = tallies[purpose].by_domain
                # the first group of the domain that has the fewest prompts
                name = min(candidates, key=lambda name: by_domain[groups[name][0].domain])
                candidates.remove(name)
                free.remove(name)
                shared[purpose] += groups[name]
                tallies[purpose].add(groups[name])
    return shared


def make_parts(documents: Iterable[Document], size: Callable[[Document], int], length: int) -> list[list[Document]]:
    """Return the documents of each prompt: one of at least `length` tokens, or several of one kind that reach it."""
    return _Tally(length, size, ()).add(documents)


def _choose_purpose(tallies: Mapping[str, _Tally], wanted: Mapping[str, int]) -> str | None:
    """Return the purpose that gets the next group; None if all have what they want."""
    counts = {purpose: tallies[purpose].by_domain.total() for purpose in (CALIBRATION, HELD_OUT)}
    if lacking := [purpose for purpose, count in counts.items() if count < wanted[purpose]]:
        return min(lacking, key=lambda purpose: (counts[purpose] > 0, counts[purpose] / wanted[purpose]))
    return CERTIFY if len(tallies[CERTIFY].groups) < wanted[CERTIFY] else None


class _Tally:
    """The prompts of one length that documents make.

    by_domain: number of prompts of each domain. groups: those that a prompt begins with.
    """

    def __init__(self, length: int, size: Callable[[Document], int], documents: Iterable[Document]) -> None:
        self._length, self._size = length, size
        # short documents are joined within one domain, and conversations apart from plain text
        self._unfinished: dict[tuple[str, bool], list[Document]] = defaultdict(list)
        self._tokens: Counter[tuple[str, bool]] = Counter()
        self.by_domain: Counter[str] = Counter()
        self.groups: set[str] = set()
        self.add(documents)

    def add(self, documents: Iterable[Document]) -> list[list[Document]]:
        """Add documents, and return the prompts that they complete."""
        prompts = []
        for document in documents:
            kind, tokens = (document.domain, bool(document.turns)), self._size(document)
            if tokens >= self._length:
                prompts.append([document])
                continue
            self._unfinished[kind].append(document)
            self._tokens[kind] += tokens
            if self._tokens[kind] >= self._length:
                prompts.append(self._unfinished.pop(kind))
                del self._tokens[kind]
        self.by_domain.update(prompt[0].domain for prompt in prompts)
        self.groups.update(prompt[0].group for prompt in prompts)
        return prompts


FEW_PROMPTS = 4  # fewer to calibrate on say little about others
WORDS = {CALIBRATION: "to calibrate on", HELD_OUT: "to adjust on", CERTIFY: "to certify on"}

log = logging.getLogger("calibrate")


def load_prompts(recipe: Recipe, tokenizer: Any) -> PromptSet:
    """Make the recipe's prompts from the user's documents, or the built-in ones.

    The same recipe and tokenizer give the same prompts, as long as the documents are the same: the built-in code is the
    Python standard library's, which changes with Python.

    Args:
        recipe: the lengths, the number of prompts of each, the documents and the seed.
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
    prompts = (_cut_files if recipe.prompts is not None else _cut_built_in)(recipe, tokenizer, wanted)
    for length, numbers in wanted.items():
        counts = {purpose: len(getattr(prompts, purpose).get(length, ())) for purpose in PURPOSES}
        if counts != numbers:
            there = ", ".join(f"{counts[purpose]} {WORDS[purpose]}" for purpose in PURPOSES)
            asked = ", ".join(map(str, numbers.values()))
            message = "%s has prompts of %d tokens for %s where %s were asked for: add documents"
            log.warning(message, recipe.prompt_source, length, there, asked)
    fewest = min(map(len, prompts.calibration.values()))
    if fewest < FEW_PROMPTS:
        message = "%s to calibrate on can say little about others: use %d or more (--num-prompts)"
        log.warning(message, pluralize(fewest, "prompt"), FEW_PROMPTS)
    return prompts


def _cut_built_in(recipe: Recipe, tokenizer: Any, wanted: Mapping[int, Mapping[str, int]]) -> PromptSet:
    """Cut prompts of the kinds in turns; fewer prompts than kinds have several each, in equal parts.

    Where a kind's text is used up the others follow it, and a prompt is of the kind that most of it is. If no other was
    asked for, there are fewer prompts.
    """
    kinds = recipe.used_domains
    used_up: set[str] = set()
    for kind in FOUND:
        read_found_documents(kind)  # read once, not by each thread

    def cut(purpose: str, length: int) -> list[Prompt]:
        rng = random.Random(f"{recipe.seed}/{length}/{purpose}")
        pool = DocumentPool(purpose, rng)
        count = wanted[length][purpose]
        prompts: dict[int, Prompt] = {}
        for number in sorted(range(count), key=lambda number: number % len(kinds)):  # what is composed takes the rest
            own = kinds[number::count] if count < len(kinds) else (kinds[number % len(kinds)],)
            order = [*rng.sample(own, len(own)), *(kind for kind in kinds if kind not in own)]
            taken = [pool.take(kind) for kind in order]
            parts = [*taken[: len(own) - 1], chain.from_iterable(taken[len(own) - 1 :])]
            documents = mix_equal_parts(tokenizer, parts, length)
            try:
                prompt = assemble_prompt(
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
        used_up.update(f"{kind} at {length}" for kind in pool.used_up.intersection(kinds))
        return [prompts[number] for number in sorted(prompts)]

    prompts = _cut_all(wanted, cut)
    if used_up:
        message = "the built-in text of %s is used up: nothing is repeated, other kinds take its place"
        log.warning(message, ", ".join(sorted(used_up)))
    return prompts


def _cut_files(recipe: Recipe, tokenizer: Any, wanted: Mapping[int, Mapping[str, int]]) -> PromptSet:
    """Cut prompts of the user's documents."""
    size = cache(partial(count_tokens, tokenizer))
    read = read_documents(recipe.prompts or ())
    documents = drop_duplicates(read)
    if len(documents) < len(read):
        log.info("%d of %d documents occur before and are left out", len(read) - len(documents), len(read))
    shared = split(documents, size, wanted, random.Random(recipe.seed))
    truncated: set[bytes] = set()

    def cut(purpose: str, length: int) -> list[Prompt]:
        rng = random.Random(f"{recipe.seed}/{length}/{purpose}")
        chosen = _take_turns(make_parts(shared[purpose], size, length))[: wanted[length][purpose]]
        if wanted[length][purpose] and not chosen and purpose != CERTIFY:
            longest = max(map(size, documents))
            raise InputError(_describe_shortage(recipe.prompt_source, documents, longest, purpose, length))
        truncated.update(part[-1].digest for part in chosen if sum(map(size, part)) > length)
        return [assemble_prompt(tokenizer, iter(part), length, rng, needles=recipe.hide_needles) for part in chosen]

    prompts = _cut_all(wanted, cut)
    if truncated:
        log.info("%d documents are longer than their prompts: what is beyond the length is left out", len(truncated))
    return prompts


def _describe_shortage(source: str, documents: Sequence[Document], longest: int, purpose: str, length: int) -> str:
    """Say that files give no prompt for a purpose at a length in tokens. longest: tokens of the longest document."""
    groups, count = len({document.group for document in documents}), pluralize(len(documents), "different document")
    remedy = "at least 1 must be, add longer prompts of other groups or use a shorter length"
    if groups == 1:
        unit = "document" if len(documents) == 1 else "group"
        remedy = (
            f"this is one {unit}, and no two sets share one, so give at least two {unit}s of {length} tokens or more, "
            "or split the text into lines of a .jsonl file"
        )
    return (
        f"{source} has 0 prompts {WORDS[purpose]} of {length} tokens or more ({count} in {pluralize(groups, 'group')}, "
        f"the longest of {longest} tokens): {remedy}"
    )


def _take_turns(chosen: Iterable[list[Document]]) -> list[list[Document]]:
    """Return the parts with their domains in turns, and in each domain its groups: the first few are of many groups."""
    domains: dict[str, dict[str, list[list[Document]]]] = {}
    for part in chosen:
        domains.setdefault(part[0].domain, {}).setdefault(part[0].group, []).append(part)
    return _merge_in_turns([_merge_in_turns(list(groups.values())) for groups in domains.values()])


def _merge_in_turns(lists: Sequence[list[list[Document]]]) -> list[list[Document]]:
    return [part for row in zip_longest(*lists) for part in row if part is not None]


def _cut_all(wanted: Mapping[int, Mapping[str, int]], cut: Callable[[str, int], list[Prompt]]) -> PromptSet:
    """Cut the prompts of every purpose and length, in threads: tokenizers leave Python's lock."""
    with ThreadPoolExecutor() as threads:
        pending = {
            (purpose, length): threads.submit(cut, purpose, length)
            for length in sorted(wanted, reverse=True)  # the longest take longest
            for purpose in reversed(PURPOSES)
            if wanted[length][purpose] or purpose == HELD_OUT
        }
        calibration, held_out, certify = (
            {length: pending[purpose, length].result() for length in wanted if (purpose, length) in pending}
            for purpose in PURPOSES
        )
    return PromptSet(calibration=calibration, held_out=held_out, certify=certify)
