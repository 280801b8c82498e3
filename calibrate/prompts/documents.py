"""Documents that prompts are cut from: users' files, the library's own text, generated text."""

from __future__ import annotations

import json
import lzma
import os
import random
import re
import sysconfig
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from calibrate.prompts import generated
from calibrate.prompts.prompt import Origins, Prompt
from calibrate.prompts.retrieval import (
    Retrieval,
    count_needles,
    encode,
    encode_all,
    get_start_tokens,
    make_needles,
    spread,
    with_facts,
)
from s2o_runtime.errors import InputError
from s2o_runtime.fields import group_by_key, read_json, short_repr

SEPARATOR = "\n\n"  # between documents and between turns
Turn = tuple[str, str]  # the role, such as "user", and the content
PURPOSES = CALIBRATION, HELD_OUT, CERTIFY = "calibration", "held_out", "certify"
# purposes of a domain's groups, in turns: certificates need most prompts, calibrating fewest
PURPOSE_CYCLE = (CERTIFY, HELD_OUT, CERTIFY, CALIBRATION, CERTIFY, HELD_OUT, CERTIFY, CERTIFY)
FOUND = ("code", "prose", "chinese")
GENERATED: dict[str, Callable[[random.Random], str]] = {
    "json": generated.write_json,
    "tables": generated.write_table,
    "logs": generated.write_log,
    "encoded": generated.write_encoded,
}
COMPOSED: dict[str, Callable[[random.Random, generated.Excerpt], str | tuple[Turn, ...]]] = {
    "chat": generated.write_conversation,
    "questions": generated.write_excerpt,
    "mixed": generated.write_excerpt,
}
# tests resemble one another, and tables of characters and documentation are not code
_NO_CODE = {"test", "tests", "idle_test", "encodings", "pydoc_data"}
_HELD_OUT_FILES = 3  # one of this many of the standard library's files is held out
_CHARACTERS = 8  # of a token, hardly more


class TooShortError(InputError):
    """Documents end before a prompt is full."""

    def __init__(self, length: int) -> None:
        super().__init__(
            f"the documents are too short for a prompt of {length} tokens: give longer ones, or a shorter length"
        )


@dataclass(frozen=True)
class Document:
    """A text or a conversation's turns, of a kind (domain) and a source (group); those of one group are in one set.

    Documents of equal content are equal.
    """

    domain: str = field(compare=False)
    group: str = field(compare=False)
    text: str = ""
    turns: tuple[Turn, ...] = ()

    @property
    def as_text(self) -> str:
        """The text; of a conversation, each role's content, up to where the assistant answers."""
        turns = (f"{role.capitalize()}: {content}{SEPARATOR}" for role, content in self.turns)
        return "".join([*turns, "Assistant: "]) if self.turns else self.text

    @property
    def contents(self) -> list[str]:
        """The texts that it consists of."""
        return [self.text, *(content for _, content in self.turns)]

    def truncate(self, share: float) -> Document:
        """Return about this share of the document from its beginning on, and at least a character."""
        left = max(1, int(share * sum(map(len, self.contents))))
        turns = []
        for role, content in self.turns:
            if left > 0:
                turns.append((role, content[:left]))
            left -= len(content)
        return replace(self, text=self.text[: max(0, left)], turns=tuple(turns))


def drop_duplicates(documents: Sequence[Document]) -> list[Document]:
    """Return the documents without those that occurred before; each stands where its content occurs last."""
    return list({document: document for document in reversed(documents)}.values())[::-1]


@cache
def read_found_documents(domain: str) -> dict[str, list[Document]]:
    """Read the documents of found text by purpose; a module of the standard library belongs to its package."""
    by_purpose: dict[str, list[Document]] = {purpose: [] for purpose in PURPOSES}
    if domain == "code":
        for name in list_library_files():
            folders = name.split("/")
            group = folders[0].removesuffix(".py").strip("_")
            purpose = PURPOSE_CYCLE[zlib.crc32(group.encode()) % len(PURPOSE_CYCLE)]
            # never calibrated or adjusted on what the evaluation takes, so its text stays unseen
            allowed = not _NO_CODE.intersection(folders) and (purpose == CERTIFY or not is_held_out(name))
            if allowed and (text := read_source(name)) is not None:
                by_purpose[purpose].append(Document("code", group, text))
    else:
        packed = (resources.files("calibrate.prompts") / "texts" / f"{domain}.jsonl.xz").read_bytes()
        purposes: dict[str, str] = {}  # of each group
        for entry in map(json.loads, lzma.decompress(packed).decode("utf-8").splitlines()):
            purpose = purposes.setdefault(entry["group"], PURPOSE_CYCLE[len(purposes) % len(PURPOSE_CYCLE)])
            by_purpose[purpose].append(Document(domain, entry["group"], entry["text"]))
    last_purpose = {document: purpose for purpose in PURPOSES for document in by_purpose[purpose]}
    return {
        purpose: [document for document in drop_duplicates(documents) if last_purpose[document] == purpose]
        for purpose, documents in by_purpose.items()
    }


class DocumentPool:
    """The built-in documents of one set, each of which is handed out once.

    used_up: kinds of found text of which a prompt of that kind needed more than there was.
    """

    def __init__(self, purpose: str, rng: random.Random) -> None:
        self._rng = rng
        self._found = {domain: _shuffle_groups(read_found_documents(domain)[purpose], rng) for domain in FOUND}
        self.used_up: set[str] = set()

    def take(self, domain: str) -> Iterator[Document]:
        """Yield the documents for a prompt of one kind: those of one group, then of others, where found text ends.

        Each prompt begins with the group that was begun longest ago, so no two have one group while there are others.
        What is generated has a group of its own for each prompt, and never ends.
        """
        if domain in FOUND:
            yield from self._take_found(domain)
            self.used_up.add(domain)
            return
        group = f"{domain} {self._rng.getrandbits(64):016x}"
        rng = random.Random(group)
        while True:
            content = GENERATED[domain](rng) if domain in GENERATED else COMPOSED[domain](rng, self._take_excerpt)
            text, turns = (content, ()) if isinstance(content, str) else ("", content)
            yield Document(domain, group, text, turns)

    def _take_found(self, domain: str) -> Iterator[Document]:
        groups = self._found[domain]
        while groups:
            groups.rotate(-1)
            while groups[-1]:
                yield groups[-1].pop()
            groups.pop()

    def _take_excerpt(self, most: int) -> str:
        """Return at most `most` characters of a document that is not composed; the rest of found text stays."""
        domain = self._rng.choice((*FOUND, *GENERATED))
        if domain in GENERATED:
            return GENERATED[domain](self._rng)[:most]
        document = next(self._take_found(domain), None)
        if document is None:
            return self._take_excerpt(most)  # of another kind: this one is used up
        if len(document.text) > most:
            self._found[domain][-1].append(replace(document, text=document.text[most:]))
        return document.text[:most]


def _shuffle_groups(documents: Sequence[Document], rng: random.Random) -> deque[list[Document]]:
    """Return the groups in random order, each a stack of its documents from a random one on."""
    groups = group_by_key((document.group, document) for document in reversed(documents))
    stacks = deque(groups[group] for group in rng.sample(sorted(groups), len(groups)))
    for stack in stacks:
        first = rng.randrange(len(stack))
        stack[:] = stack[first:] + stack[:first]
    return stacks


def join_documents(
    tokenizer: Any, documents: Iterator[Document], length: int, separator: str = SEPARATOR
) -> tuple[list[int], Origins]:
    """Return the first `length` tokens of documents, the tokenizer's own first before them, and their origins.

    Raises TooShortError.
    """
    ids, between = get_start_tokens(tokenizer), encode(tokenizer, separator)
    origins: Origins = Counter()
    while texts := _take_bytes(documents, length - len(ids)):
        most = _CHARACTERS * (length - len(ids))  # long files are not read to their end for a few tokens
        encoded = encode_all(tokenizer, [text[:most] for _, text in texts])
        for (document, text), text_ids in zip(texts, encoded, strict=True):
            before = len(ids)
            ids += between if origins else []
            cut_short = len(text) > most and len(text_ids) <= length - len(ids)
            ids += encode(tokenizer, text) if cut_short else text_ids
            origins[document.domain, document.group] += min(len(ids), length) - before
            if len(ids) >= length:
                return ids[:length], origins
    raise TooShortError(length)


def _take_bytes(documents: Iterator[Document], missing: int) -> list[tuple[Document, str]]:
    """Take as many documents as `missing` tokens need at least: a text has no more tokens than bytes."""
    taken = []
    while missing > 0 and (document := next(documents, None)) is not None:
        taken.append((document, document.as_text))
        missing -= len(taken[-1][1].encode("utf-8", "surrogatepass"))
    return taken


def hide_in_documents(
    tokenizer: Any, documents: Iterator[Document], length: int, retrieval: Retrieval, separator: str = SEPARATOR
) -> Prompt:
    """Make a prompt of `length` tokens: plain text with hidden facts, and their questions. Raises TooShortError."""
    text, origins = join_documents(tokenizer, documents, length - len(retrieval.questions), separator)
    return Prompt.from_ids(*retrieval.hide_in(text, len(get_start_tokens(tokenizer))), origins)


TEXT_SUFFIXES = (".txt", ".md")
SUFFIXES = (".jsonl", *TEXT_SUFFIXES)
COLUMNS = ("text", "prompt", "messages")
# what else holds text in merged data sets, or in a message: a document of the other columns alone would lose it
UNREAD = (
    *("completion", "response", "answer", "output", "chosen", "rejected", "conversations"),
    *("instruction", "input", "question", "context", "content", "system", "tools"),
)
UNREAD_IN_MESSAGE = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
EXPECTED = 'expected a string, or an object with "text", "prompt" or "messages"'
SURROGATE = re.compile("[\ud800-\udfff]")
Entry = TypeVar("Entry")


def read_documents(paths: Sequence[Path]) -> list[Document]:
    """Read the documents of files and folders.

    A .txt or .md file is one document; any other file that is named is JSON, an entry a line or an array of entries:
    strings, or objects with "text", "prompt" or chat "messages", and optionally with "group" and "domain". Of a folder,
    the .jsonl, .txt and .md files are read, in the order of their names. Without a "group" an entry is a group of its
    own, and so is a text, but texts in one folder within a folder that was named are one group. Without a "domain" it
    is the file's name without its ending, or, for texts, the folder's that was named. Raises InputError, with file and
    line, for what cannot be read or has no prompts.
    """
    documents = []
    for path in paths:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
            if not files:
                raise InputError(f"prompt folder {path} holds no {', '.join(SUFFIXES)} files: check the path")
            for file in files:
                documents += _read_file(file, path.stem, file if file.parent == path else file.parent)
        elif content := _read_file(path, path.stem, path):
            documents += content
        else:
            raise InputError(f"prompt file {path} is empty: leave it out")
    return documents


def _read_file(path: Path, domain: str, group: Path) -> list[Document]:
    """Read the documents of one file; a text is of `domain` and `group`, and a blank one is none."""
    if path.suffix.lower() not in TEXT_SUFFIXES:
        return parse_entries(path, lambda entry, location: make_document(entry, path.stem, location), EXPECTED)
    text = read_text(path)
    return [Document(domain, str(group), text)] if text.strip() else []


def read_text(path: Path) -> str:
    """Return a prompt file's text without its byte order mark. Raises InputError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"prompt file {path} cannot be read ({reason}): check the path") from error


def parse_entries(path: Path, parse: Callable[[Any, str], Entry], expected: str) -> list[Entry]:
    """Read the entries of a file of JSON lines, or of one JSON array.

    `parse` makes an entry from its JSON and its location, file and line; its ValueError names the problem. `expected`
    is the remedy in messages. Raises InputError, with file and line, if there are no entries or one is none.
    """
    text = read_text(path)
    is_array = text.lstrip().startswith("[")  # a line of JSON lines is no array
    # joined files have byte order marks within
    lines = enumerate(text.replace("\n\ufeff", "\n").split("\n"), 1)
    entries = []
    for line, source in [(1, text)] if is_array else [(at, content) for at, content in lines if content.strip()]:
        location = f"{path}:{line}"
        try:
            value = read_json(source)
            for number, entry in enumerate(value if is_array else [value], 1):
                location = f"{path}: entry {number}" if is_array else location
                entries.append(parse(entry, location))
        except json.JSONDecodeError as error:
            problem = f"this is not JSON ({error.msg} at column {error.colno}): {expected}"
            raise InputError(f"{path}:{line + error.lineno - 1}: {problem}") from error
        except RecursionError as error:
            raise InputError(f"{location}: this is nested too deep: {expected}") from error
        except ValueError as error:
            raise InputError(f"{location}: {error}") from error
    if not entries:
        raise InputError(f"prompt file {path} holds no prompts: {expected} per line")
    return entries


def make_document(entry: Any, domain: str, group: str, expected: str = EXPECTED) -> Document:
    """Return the document of an entry's JSON: a string, or an object of which one column holds text.

    It has this domain and group unless the entry has its own. `expected` is the remedy in messages. Raises ValueError
    if no column or several hold text, or the text is broken.
    """
    fields = {"text": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, dict):
        raise ValueError(f"this is {short_repr(entry)}: {expected}")
    filled = _list_filled(fields, (*COLUMNS, *UNREAD))
    if len(filled) > 1:
        columns = " and ".join(f'"{name}"' for name in filled)
        raise ValueError(f'{columns} have text, and one is read: join them in "text" or "messages", or leave one out')
    domain, group = _read_label(fields, "domain", domain), _read_label(fields, "group", group)
    content = fields[filled[0]] if filled else ""
    if filled == ["messages"] and isinstance(content, list):
        document = Document(domain, group, turns=tuple(map(_read_turn, content)))
    elif set(COLUMNS[:2]).intersection(filled or fields) and isinstance(content, str):
        document = Document(domain, group, check_text(content))
    else:
        raise ValueError(f"this is {short_repr(entry)}: {expected}")
    if not "".join(document.contents).strip():
        raise ValueError("this has no text: leave it out")
    return document


def check_text(text: str) -> str:
    """Return a text as it is. Raises ValueError if it holds half of a character, which no tokenizer takes."""
    if half := SURROGATE.search(text):
        code = f"\\u{ord(half[0]):04x}"
        raise ValueError(f"the text holds half of a surrogate pair ({code}): write the whole character or leave it out")
    return text


def _list_filled(fields: dict[str, Any], names: Sequence[str]) -> list[str]:
    """Return the names whose fields are neither missing nor null nor empty nor blank."""
    values = {name: fields.get(name) for name in names}
    return [name for name, value in values.items() if (value.strip() if isinstance(value, str) else value)]


def _read_label(fields: dict[str, Any], key: str, default: str) -> str:
    if key not in fields:
        return default
    value = fields[key]
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise ValueError(f'"{key}" is {short_repr(value)}: expected a name')
    return check_text(str(value))


def _read_turn(message: Any) -> Turn:
    """Return a message's role and text; a list of parts may hold text alone."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        content = "\n".join(texts) if len(texts) == len(content) else None
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise ValueError('expected "messages" with a "role" and a text as "content" each')
    if unread := _list_filled(message, UNREAD_IN_MESSAGE):
        raise ValueError(f'a message has "{unread[0]}", which is not read: write it into "content", or leave it out')
    return check_text(message["role"]), check_text(content)


@cache
def list_library_files() -> dict[str, Path]:
    """List the sources of the running standard library in order, by their paths from its folder, with slashes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in ("site-packages", "dist-packages")]
        files += [Path(folder) / name for name in names if name.endswith(".py")]
    return {path.relative_to(root).as_posix(): path for path in sorted(files)}


def read_source(name: str) -> str | None:
    """Return the text of one of `list_library_files` after a line with its name; None if it cannot be read."""
    try:
        return f"# {name}\n{list_library_files()[name].read_text(encoding='utf-8')}\n"
    except (OSError, UnicodeDecodeError):
        return None


def is_held_out(name: str) -> bool:
    """Tell whether one of `list_library_files` is never calibrated on."""
    return zlib.crc32(name.encode()) % _HELD_OUT_FILES == 0


def shuffle_held_out_sources(rng: random.Random, used: set[str] | None = None) -> Iterator[Document]:
    """Yield the held-out files: folders in random order, and in each all files from a random one on.

    Files of one folder are alike, so every prompt is to take the folders in an order of its own. Those in `used` are
    left out, and those that are taken added to it.
    """
    folders = group_by_key((path.parent, name) for name, path in list_library_files().items())
    used = set() if used is None else used
    for folder in rng.sample(sorted(folders), len(folders)):
        first = rng.randrange(len(folders[folder]))
        for name in folders[folder][first:] + folders[folder][:first]:
            if name not in used and is_held_out(name) and (text := read_source(name)) is not None:
                used.add(name)
                yield Document("code", "", text)


def take_first_tokens(tokenizer: Any, documents: Iterator[Document], length: int) -> list[int]:
    """Return the first `length` tokens of documents. Raises TooShortError."""
    return join_documents(tokenizer, documents, length, separator="")[0]


def make_held_out_prompts(tokenizer: Any, length: int, count: int, seed: int) -> list[Prompt]:
    """Make `count` prompts of `length` tokens of the standard library's held-out sources, with needles, from a seed.

    No file is in two of them, and a quarter of a prompt at most are the questions at its end. Raises TooShortError.
    """
    rng = random.Random(f"{seed}/{length}/held out")
    used: set[str] = set()
    prompts = []
    for _ in range(count):
        retrieval = Retrieval.from_needles(tokenizer, make_needles(count_needles(length), rng), rng)
        sources = shuffle_held_out_sources(rng, used)
        prompts.append(hide_in_documents(tokenizer, sources, length, retrieval.cap_questions(length // 4), ""))
    return prompts


def make_prompts_of_one_text(
    tokenizer: Any, length: int, count: int, rng: random.Random
) -> tuple[list[list[int]], list[str]]:
    """Make `count` prompts that hide the same codes in the same held-out text, and each ask for another of them.

    The longest has `length` tokens. Returns each prompt's token ids, and the codes that answer them.
    """
    needles = make_needles(count, rng)
    retrieval = Retrieval.from_needles(tokenizer, needles, rng)
    questions = [encode(tokenizer, needle.question) for needle in needles]
    text = take_first_tokens(tokenizer, shuffle_held_out_sources(rng), length - max(map(len, questions)))
    text = with_facts(text, retrieval.facts, spread(count, len(get_start_tokens(tokenizer)), len(text)))
    return [text + question for question in questions], [needle.code for needle in needles]
