"""Documents, and the built-in ones of ten kinds, each in one of three sets.

Found text is split by group: code is the Python standard library that runs this program, prose and Chinese are texts/,
whose SOURCES.txt names their origin. Generated text has a seed for a group. What is composed takes pieces of both.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from calibrate.prompts import generated
from calibrate.prompts.stdlib import is_held_out, library_files, read_source

SEPARATOR = "\n\n"  # between documents and between turns
Turn = tuple[str, str]  # the role, such as "user", and what is said
PURPOSES = CALIBRATION, HELD_OUT, CERTIFY = "calibration", "held_out", "certify"
# what a domain's groups are for, in turns: certificates need most prompts, calibrating fewest
_TURNS = (CERTIFY, HELD_OUT, CERTIFY, CALIBRATION, CERTIFY, HELD_OUT, CERTIFY, CERTIFY)
FOUND = ("code", "prose", "chinese")
GENERATED: dict[str, Callable[[random.Random], str]] = {
    "json": generated.json_text,
    "tables": generated.table_text,
    "logs": generated.log_text,
    "encoded": generated.encoded_text,
}
COMPOSED: dict[str, Callable[[random.Random, generated.Piece], str | tuple[Turn, ...]]] = {
    "chat": generated.conversation,
    "questions": generated.excerpt,
    "mixed": generated.excerpt,
}
# tests resemble one another, and tables of characters and documentation are not code
_NO_CODE = {"test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class Document:
    """A text or a conversation, which is in at most one of the three sets.

    domain: what kind of text it is. group: what it belongs to; documents of one group are in one set. text: empty for a
    conversation. turns: of a conversation.
    """

    domain: str
    group: str
    text: str = ""
    turns: tuple[Turn, ...] = ()

    @property
    def as_text(self) -> str:
        """The text; of a conversation, what each role says, up to where the assistant answers."""
        turns = (f"{role.capitalize()}: {content}{SEPARATOR}" for role, content in self.turns)
        return "".join([*turns, "Assistant: "]) if self.turns else self.text

    def beginning(self, share: float) -> Document:
        """About this share of it, and at least a character."""
        left = max(1, int(share * (len(self.text) + sum(len(content) for _, content in self.turns))))
        turns = []
        for role, content in self.turns:
            turns += [(role, content[:left])] if left > 0 else []
            left -= len(content)
        return replace(self, text=self.text[: max(0, left)], turns=tuple(turns))

    @property
    def digest(self) -> bytes:
        """What two documents have in common that are the same."""
        return hashlib.sha256(repr((self.text, self.turns)).encode("utf-8", "surrogatepass")).digest()


def distinct(documents: Iterable[Document]) -> list[Document]:
    """The documents without those that occurred before."""
    return list({document.digest: document for document in reversed(list(documents))}.values())[::-1]


@cache
def found_documents(domain: str) -> dict[str, list[Document]]:
    """The documents of found text by purpose.

    A module of the standard library belongs to its package. No such file that `is_held_out` is calibrated or adjusted
    on, so the evaluation's text stays unseen.
    """
    split: dict[str, list[Document]] = {purpose: [] for purpose in PURPOSES}
    if domain == "code":
        for name in library_files():
            folders = name.split("/")
            group = folders[0].removesuffix(".py").strip("_")
            purpose = _TURNS[zlib.crc32(group.encode()) % len(_TURNS)]
            allowed = not _NO_CODE.intersection(folders) and (purpose == CERTIFY or not is_held_out(name))
            if allowed and (text := read_source(name)) is not None:
                split[purpose].append(Document("code", group, text))
    else:
        documents = _shipped(domain)
        groups = list(dict.fromkeys(document.group for document in documents))
        purposes = {group: _TURNS[number % len(_TURNS)] for number, group in enumerate(groups)}
        for document in documents:
            split[purposes[document.group]].append(document)
    unique = {document.digest: purpose for purpose in PURPOSES for document in split[purpose]}
    return {
        purpose: [document for document in distinct(documents) if unique[document.digest] == purpose]
        for purpose, documents in split.items()
    }


def _shipped(domain: str) -> list[Document]:
    packed = (resources.files("calibrate.prompts") / "texts" / f"{domain}.jsonl.xz").read_bytes()
    entries = map(json.loads, lzma.decompress(packed).decode("utf-8").splitlines())
    return [Document(domain, entry["group"], entry["text"]) for entry in entries]


class Supply:
    """Hands out the built-in documents of one set, none twice.

    used_up: kinds of found text of which a prompt of that kind needed more than there was.
    """

    def __init__(self, purpose: str, rng: random.Random) -> None:
        self._rng = rng
        self._found = {domain: _shuffled(found_documents(domain)[purpose], rng) for domain in FOUND}
        self.used_up: set[str] = set()

    def drawn(self, domain: str) -> Iterator[Document]:
        """The documents for a prompt of one kind: those of one group, then of others, where found text ends.

        Each prompt begins with the group that was begun longest ago, so no two have one group while there are others.
        What is generated has a group of its own for each prompt, and never ends.
        """
        if domain in FOUND:
            yield from self._drawn_from(self._found[domain])
            self.used_up.add(domain)
            return
        group = f"{domain} {self._rng.getrandbits(64):016x}"
        rng = random.Random(group)
        while True:
            content = GENERATED[domain](rng) if domain in GENERATED else COMPOSED[domain](rng, self._piece)
            text, turns = (content, ()) if isinstance(content, str) else ("", content)
            yield Document(domain, group, text, turns)

    @staticmethod
    def _drawn_from(groups: deque[list[Document]]) -> Iterator[Document]:
        while groups:
            groups.rotate(-1)
            while groups[-1]:
                yield groups[-1].pop()
            groups.pop()

    def _piece(self, most: int) -> str:
        """At most so many characters of any document that is not composed; the rest of found text stays to be drawn."""
        domain = self._rng.choice((*FOUND, *GENERATED))
        if domain in GENERATED:
            return GENERATED[domain](self._rng)[:most]
        for document in self._drawn_from(self._found[domain]):
            if len(document.text) > most:
                self._found[domain][-1].append(replace(document, text=document.text[most:]))
            return document.text[:most]
        return self._piece(most)  # of another kind: this one is used up


def _shuffled(documents: Iterable[Document], rng: random.Random) -> deque[list[Document]]:
    """The groups in random order, each a stack of its documents from a random one on."""
    groups: dict[str, list[Document]] = {}
    for document in documents:
        groups.setdefault(document.group, []).insert(0, document)
    stacks = deque(groups[group] for group in rng.sample(sorted(groups), len(groups)))
    for stack in stacks:
        first = rng.randrange(len(stack))
        stack[:] = stack[first:] + stack[:first]
    return stacks
