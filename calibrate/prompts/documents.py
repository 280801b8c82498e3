"""Documents, and the built-in ones: four domains, each split by group into three sets that share none.

Code is the Python standard library that runs this program. The other domains are texts/, whose SOURCES.txt names their
origin and licence.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from calibrate.prompts.stdlib import is_held_out, library, library_files

PURPOSES = CALIBRATION, HELD_OUT, CERTIFY = "calibration", "held_out", "certify"
# what a domain's groups are for, in turns: certificates need most prompts, adjusting fewest
_TURNS = (CERTIFY, CALIBRATION, CERTIFY, HELD_OUT, CERTIFY, CALIBRATION, CERTIFY, CERTIFY)
# tests resemble one another, and tables of characters and documentation are not code
_NO_CODE = {"test", "tests", "idle_test", "encodings", "pydoc_data"}

Turn = tuple[str, str]  # the role, such as "user", and what is said


@dataclass(frozen=True)
class Document:
    """A text or a conversation, which is in at most one of the three sets.

    domain: What kind of text it is. group: What it belongs to; documents of one group are in one set. text: Empty for a
    conversation. turns: Of a conversation.
    """

    domain: str
    group: str
    text: str = ""
    turns: tuple[Turn, ...] = ()

    @property
    def digest(self) -> bytes:
        """What two documents have in common that are the same."""
        return hashlib.sha256(repr((self.text, self.turns)).encode("utf-8", "surrogatepass")).digest()


def distinct(documents: Iterable[Document]) -> list[Document]:
    """The documents without those that occurred before."""
    return list({document.digest: document for document in reversed(list(documents))}.values())[::-1]


@cache
def built_in_documents(domain: str) -> dict[str, list[Document]]:
    """A built-in domain's documents by purpose.

    A module of the standard library belongs to its package. No such file that `is_held_out` is calibrated or adjusted
    on, so the evaluation's text stays unseen.
    """
    split: dict[str, list[Document]] = {purpose: [] for purpose in PURPOSES}
    if domain == "code":
        for name, document in _library_files():
            purpose = _TURNS[zlib.crc32(document.group.encode()) % len(_TURNS)]
            if purpose == CERTIFY or not is_held_out(name):
                split[purpose].append(document)
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


def _library_files() -> Iterator[tuple[str, Document]]:
    root = library()
    for path in library_files():
        relative = path.relative_to(root)
        if _NO_CODE & set(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        group = relative.parts[0].removesuffix(".py").strip("_")
        yield relative.as_posix(), Document("code", group, f"# {relative.as_posix()}\n{text}\n")


def _shipped(domain: str) -> list[Document]:
    packed = (resources.files("calibrate.prompts") / "texts" / f"{domain}.jsonl.xz").read_bytes()
    documents = []
    for line in lzma.decompress(packed).decode("utf-8").splitlines():
        entry = json.loads(line)
        if "question" in entry:
            turns = (("user", entry["question"]), ("assistant", entry["answer"]))
            documents.append(Document(domain, entry["group"], turns=turns))
        else:
            documents.append(Document(domain, entry["group"], entry["text"]))
    return documents


class Supply:
    """Hands out the documents of one domain and purpose, none twice before all were handed out."""

    def __init__(self, documents: Sequence[Document], rng: random.Random) -> None:
        self._groups: dict[str, list[Document]] = {}
        for document in documents:
            self._groups.setdefault(document.group, []).append(document)
        self._rng = rng
        self._used: set[bytes] = set()
        self.repeats = False  # whether documents had to be handed out again

    def drawn(self) -> Iterator[Document]:
        """Groups in random order, and in each all documents from a random one on.

        When all are used they are handed out again, each from a random character on.
        """
        while True:
            for group in self._rng.sample(sorted(self._groups), len(self._groups)):
                documents = self._groups[group]
                first = self._rng.randrange(len(documents))
                for document in documents[first:] + documents[:first]:
                    if document.digest in self._used:
                        continue
                    self._used.add(document.digest)
                    start = self._rng.randrange(len(document.text)) if self.repeats and document.text else 0
                    yield Document(document.domain, document.group, document.text[start:], document.turns)
            self._used.clear()
            self.repeats = True
