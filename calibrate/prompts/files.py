"""The user's documents: JSON lines, plain text and Markdown, and folders of these."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from calibrate.prompts.documents import Document, Turn
from s2o_runtime.errors import InputError

TEXT_SUFFIXES = (".txt", ".md")
SUFFIXES = (".jsonl", *TEXT_SUFFIXES)
Entry = TypeVar("Entry")
EXPECTED = 'expected a string, or an object with "text", "prompt" or "messages"'


def read_documents(paths: Sequence[Path]) -> list[Document]:
    """The documents of files and folders.

    A .txt or .md file is one document; any other file that is named is JSON lines: strings, or objects with "text",
    "prompt" or chat "messages", and optionally with "group" and "domain". Of a folder, the .jsonl, .txt and .md files
    are read, in the order of their names. Without a "group" a line is a group of its own, and so is a text, but texts
    in one folder within a folder that was named are one group. Without a "domain" it is the file's name without its
    ending, or, for texts, the folder's that was named.

    Raises:
        InputError: A file or folder cannot be read or has no prompts, or a line is none; it names file and line.
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
    return parsed_lines(path, lambda entry, number: _of_entry(entry, path, number), EXPECTED)


def read_text(path: Path) -> str:
    """A prompt file's text. Raises InputError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"prompt file {path} cannot be read ({reason}): check the path") from error


def parsed_lines(path: Path, parse: Callable[[Any, int], Entry], expected: str) -> list[Entry]:
    """What a file of JSON lines holds.

    Args:
        path: the file.
        parse: makes an entry of a line's JSON and number; ValueError says what is wrong with it.
        expected: what a line should be, for messages.

    Raises:
        InputError: The file cannot be read or has no entries, or a line is none; it names file and line.
    """
    entries = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                entries.append(parse(json.loads(line), number))
            except json.JSONDecodeError as error:
                what = f"this is not JSON ({error.msg} at column {error.colno}): {expected}"
                raise InputError(f"{path}:{number}: {what}") from error
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}:{number}: {error}") from error
    if not entries:
        raise InputError(f"prompt file {path} holds no prompts: {expected} per line")
    return entries


def _of_entry(entry: Any, path: Path, number: int) -> Document:
    own_group = f"{path}:{number}"
    if isinstance(entry, str):
        return Document(path.stem, own_group, entry)
    if not isinstance(entry, dict):
        raise ValueError(f"this is {_short(entry)}: {EXPECTED}")
    domain, group = _label(entry, "domain", path.stem), _label(entry, "group", own_group)
    for key in ("text", "prompt"):
        if isinstance(entry.get(key), str):
            return Document(domain, group, entry[key])
    if isinstance(entry.get("messages"), list) and entry["messages"]:
        return Document(domain, group, turns=tuple(_turn(message) for message in entry["messages"]))
    raise ValueError(f"this is {_short(entry)}: {EXPECTED}")


def _short(entry: Any) -> str:
    return textwrap.shorten(json.dumps(entry, ensure_ascii=False), 60, placeholder=" ...")


def _label(entry: dict[str, Any], key: str, default: str) -> str:
    value = entry.get(key, default)
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise ValueError(f'"{key}" is {value!r}: expected a name')
    return str(value)


def _turn(message: Any) -> Turn:
    """A message's role and text; a list of parts may hold text alone."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        content = "\n".join(texts) if len(texts) == len(content) else None
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise ValueError('expected "messages" with a "role" and a text as "content" each')
    return message["role"], content
