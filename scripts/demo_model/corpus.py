#!/usr/bin/env python3
"""Collect openly licensed text from this Python installation and tokenise it for the demo model.

The text is the standard library's sources, and of every installed package with an open licence its README
and its docstrings under the signatures they document. Files of one folder stay together, so that far-apart
parts of a long window belong to one subject.

    python -m scripts.demo_model.corpus OUT

writes OUT/{train,hold}.bin.xz (uint16 tokens), OUT/tokenizer.json and OUT/corpus.json (what was read, under
which licence).
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import lzma
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from calibrate.prompts.documents import list_library_files

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
HOLD_OUT_SHARE = 0.03
MAX_FILE_BYTES = 400_000
OPEN_LICENCES = re.compile(r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|Unlicense|Zlib|HPND)\b", re.I)
CLOSED_LICENCES = re.compile(r"\b(GPL|LGPL|AGPL|GNU|Proprietary|NVIDIA|Commercial)\b", re.I)


@dataclass(frozen=True)
class TextSource:
    """The sources that were read, and how much of them."""

    name: str
    version: str
    licence: str
    characters: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)

    train, hold, sources = collect()
    tokenizer = train_tokenizer(train)
    tokenizer.save(str(out / "tokenizer.json"))
    for name, texts in (("train", train), ("hold", hold)):
        tokens = encode(tokenizer, texts)
        with lzma.open(out / f"{name}.bin.xz", "wb", preset=6) as file:
            file.write(tokens.tobytes())
        print(f"{name}: {len(texts)} files, {len(tokens) / 1e6:.1f} M tokens")
    (out / "corpus.json").write_text(json.dumps([asdict(source) for source in sources], indent=1) + "\n")


def collect() -> tuple[list[str], list[str], list[TextSource]]:
    """Texts to train on, texts to hold out, and where they came from."""
    train: list[str] = []
    hold: list[str] = []
    sources: list[TextSource] = []
    for source, texts in _all_texts():
        characters = 0
        for key, text in texts:
            held = int(hashlib.sha256(key.encode()).hexdigest(), 16) % 10_000 < 10_000 * HOLD_OUT_SHARE
            (hold if held else train).append(text)
            characters += len(text)
        if characters:
            sources.append(TextSource(*source, characters))
    return train, hold, sources


def _all_texts() -> Iterator[tuple[tuple[str, str, str], Iterator[tuple[str, str]]]]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield ("CPython standard library", version, "PSF-2.0"), _standard_library()
    for distribution in sorted(metadata.distributions(), key=lambda d: (d.metadata["Name"] or "").lower()):
        licence = licence_of(distribution)
        if licence is not None:
            name = distribution.metadata["Name"]
            yield (name, distribution.version, licence), _package_documentation(distribution)


def licence_of(distribution: metadata.Distribution) -> str | None:
    """The open licence a distribution states, or None if it states none or a restrictive one."""
    meta: Any = distribution.metadata  # an email.message.Message
    classifiers = [c.split("::")[-1].strip() for c in meta.get_all("Classifier") or [] if c.startswith("License")]
    stated = meta.get("License-Expression") or "; ".join(classifiers) or (meta.get("License") or "")[:80]
    stated = " ".join(stated.split())
    return stated if OPEN_LICENCES.search(stated) and not CLOSED_LICENCES.search(stated) else None


def _standard_library() -> Iterator[tuple[str, str]]:
    for name, path in list_library_files().items():
        if not name.startswith(("test/encoded", "lib2to3/tests/data")):
            text = _read(path)
            if text:
                yield "stdlib/" + name, f"# {name}\n{text}"


def _package_documentation(distribution: metadata.Distribution) -> Iterator[tuple[str, str]]:
    name = distribution.metadata["Name"]
    meta: Any = distribution.metadata  # an email.message.Message
    readme = meta.get_payload()
    if isinstance(readme, str) and len(readme) > 200:
        yield f"{name}/README", readme
    for file in sorted(distribution.files or [], key=str):
        if file.suffix == ".py" and ".." not in file.parts:
            text = _read(Path(str(distribution.locate_file(file))))
            documentation = _documentation(text) if text else ""
            if len(documentation) > 200:
                yield f"{name}/{file.as_posix()}", f"# {file.as_posix()}\n{documentation}"


def _documentation(source: str) -> str:
    """The docstrings of a module under the signatures they document, in source order."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ""
    parts: list[str] = []

    def visit(node: ast.AST, indent: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                text = ast.get_docstring(child)
                if text:
                    head = f"class {child.name}:"
                    if not isinstance(child, ast.ClassDef):
                        head = f"def {child.name}({ast.unparse(child.args)}):"
                    body = "\n".join((indent + "    " + line).rstrip() for line in text.splitlines())
                    parts.append(f'{indent}{head}\n{indent}    """\n{body}\n{indent}    """\n')
                if isinstance(child, ast.ClassDef):
                    visit(child, indent + "    ")

    module = ast.get_docstring(tree)
    if module:
        parts.append(f'"""\n{module}\n"""\n')
    visit(tree, "")
    return "\n".join(parts)


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return ""
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE with every digit a token of its own, so that a code is five tokens."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"[0-9]"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[::4], trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """The tokens of all texts, each behind an end-of-text token, uint16."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None  # `train_tokenizer` made it
    pieces: list[int] = []
    for start in range(0, len(texts), 512):
        for encoding in tokenizer.encode_batch(texts[start : start + 512]):
            pieces.append(end)
            pieces.extend(encoding.ids)
    return np.asarray(pieces, dtype=np.uint16)


if __name__ == "__main__":
    main()
