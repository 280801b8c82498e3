"""Read the user's prompt files: JSON lines or arrays, plain text and Markdown, and folders of these."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from calibrate.prompts.documents import Document, Turn
from s2o_runtime.errors import InputError
from s2o_runtime.fields import shown

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
CONVERTIBLE_DIGITS = 640  # of a whole number; Python can be told to refuse longer ones
Entry = TypeVar("Entry")


def read_documents(paths: Sequence[Path]) -> list[Document]:
    """Read the documents of files and folders.

    A .txt or .md file is one document; any other file that is named is JSON, an entry a line or an array of entries:
    strings, or objects with "text", "prompt" or chat "messages", and optionally with "group" and "domain". Of a folder,
    the .jsonl, .txt and .md files are read, in the order of their names. Without a "group" an entry is a group of its
    own, and so is a text, but texts in one folder within a folder that was named are one group. Without a "domain" it
    is the file's name without its ending, or, for texts, the folder's that was named.

    Raises:
        InputError: A file or folder cannot be read or has no prompts, or an entry is none; it names file and line.
    """
    return [document for path in paths for document in (_of_folder(path) if path.is_dir() else _of_file(path, None))]


def _of_folder(folder: Path) -> list[Document]:
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        raise InputError(f"prompt folder {folder} holds no {', '.join(SUFFIXES)} files: check the path")
    return [document for path in files for document in _of_file(path, folder)]


def _of_file(path: Path, folder: Path | None) -> list[Document]:
    if path.suffix.lower() in TEXT_SUFFIXES:
        content = read_text(path)
        group = path if folder is None or path.parent == folder else path.parent
        documents = [Document((folder or path).stem, str(group), content)] if content.strip() else []
        if folder is None and not documents:
            raise InputError(f"prompt file {path} is empty: leave it out")
        return documents
    return parse_entries(path, lambda entry, location: document_of(entry, path.stem, location), EXPECTED)


def read_text(path: Path) -> str:
    """Return a prompt file's text without its byte order mark. Raises InputError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"prompt file {path} cannot be read ({reason}): check the path") from error


def parse_entries(path: Path, parse: Callable[[Any, str], Entry], expected: str) -> list[Entry]:
    """Read the entries of a file of JSON lines, or of one JSON array.

    Args:
        path: the file.
        parse: makes an entry of its JSON and its location, file and line; ValueError says what is wrong with it.
        expected: what an entry should be, for messages.

    Raises:
        InputError: The file cannot be read or has no entries, or an entry is none; it names file and line.
    """
    text = read_text(path)
    if text.lstrip().startswith("["):  # a line of JSON lines is no array
        array = _parse_json(text, path, 1, expected)
        values = [(f"{path}: entry {number}", value) for number, value in enumerate(array, 1)]
    else:
        lines = enumerate(text.replace("\n\ufeff", "\n").split("\n"), 1)  # joined files have byte order marks within
        values = [(f"{path}:{at}", _parse_json(line, path, at, expected)) for at, line in lines if line.strip()]
    entries = []
    for location, value in values:
        try:
            entries.append(parse(value, location))
        except ValueError as error:
            raise InputError(f"{location}: {error}") from error
    if not entries:
        raise InputError(f"prompt file {path} holds no prompts: {expected} per line")
    return entries


def _parse_json(text: str, path: Path, line: int, expected: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique_names, parse_int=_whole_number)
    except json.JSONDecodeError as error:
        problem = f"this is not JSON ({error.msg} at column {error.colno}): {expected}"
        raise InputError(f"{path}:{line + error.lineno - 1}: {problem}") from error
    except (ValueError, RecursionError) as error:
        problem = f"this is nested too deep: {expected}" if isinstance(error, RecursionError) else str(error)
        raise InputError(f"{path}:{line}: {problem}") from error


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has {shown(twice)} twice, and only the last would be read: name each once")
    return fields


def _whole_number(digits: str) -> float:
    return int(digits) if len(digits) <= CONVERTIBLE_DIGITS else float(digits)


def document_of(entry: Any, domain: str, group: str, expected: str = EXPECTED) -> Document:
    """Return the document of an entry: a string, or an object of which one column holds text.

    Args:
        entry: its JSON.
        domain, group: what the document is of if the entry does not say.
        expected: what an entry should be, for messages.

    Raises:
        ValueError: No column or several hold text, or the text is broken; it says which.
    """
    fields = {"text": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, dict):
        raise ValueError(f"this is {shown(entry)}: {expected}")
    filled = _filled(fields, (*COLUMNS, *UNREAD))
    if len(filled) > 1:
        columns = " and ".join(f'"{name}"' for name in filled)
        raise ValueError(f'{columns} have text, and one is read: join them in "text" or "messages", or leave one out')
    domain, group = _label(fields, "domain", domain), _label(fields, "group", group)
    content = fields[filled[0]] if filled else ""
    if filled == ["messages"] and isinstance(content, list):
        document = Document(domain, group, turns=tuple(map(_turn, content)))
    elif set(COLUMNS[:2]).intersection(filled or fields) and isinstance(content, str):
        document = Document(domain, group, check_text(content))
    else:
        raise ValueError(f"this is {shown(entry)}: {expected}")
    if not (document.text + "".join(content for _, content in document.turns)).strip():
        raise ValueError("this has no text: leave it out")
    return document


def check_text(text: str) -> str:
    """Return a text as it is. Raises ValueError if it holds half of a character, which no tokenizer takes."""
    if half := SURROGATE.search(text):
        code = f"\\u{ord(half[0]):04x}"
        raise ValueError(f"the text holds half of a surrogate pair ({code}): write the whole character or leave it out")
    return text


def _filled(fields: dict[str, Any], names: Sequence[str]) -> list[str]:
    """The names whose fields are neither missing nor null nor empty nor blank."""
    values = {name: fields.get(name) for name in names}
    return [name for name, value in values.items() if (value.strip() if isinstance(value, str) else value)]


def _label(fields: dict[str, Any], key: str, default: str) -> str:
    if key not in fields:
        return default
    value = fields[key]
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise ValueError(f'"{key}" is {shown(value)}: expected a name')
    return check_text(str(value))


def _turn(message: Any) -> Turn:
    """A message's role and text; a list of parts may hold text alone."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        content = "\n".join(texts) if len(texts) == len(content) else None
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise ValueError('expected "messages" with a "role" and a text as "content" each')
    if unread := _filled(message, UNREAD_IN_MESSAGE):
        raise ValueError(f'a message has "{unread[0]}", which is not read: write it into "content", or leave it out')
    return check_text(message["role"]), check_text(content)
