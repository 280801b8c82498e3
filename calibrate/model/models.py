"""Load a model's configuration, tokenizer and weights by alias, folder, GGUF file or hub id."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from calibrate.model.weights import (
    INDEX,
    SINGLE,
    Checkpoint,
    InMemory,
    RandomWeights,
    Weights,
    build_skeleton,
    check_quantisation,
    explain_no_streaming,
    find_quantisation,
    load_whole,
)
from s2o_runtime.errors import ModelError, ResourceError, get_first_line
from s2o_runtime.fields import did_you_mean
from s2o_runtime.identity import Geometry, geometry
from s2o_runtime.layer_kinds import get_text_config

DEMO_FOLDER = Path(__file__).parents[1] / "demo" / "model"
ARCHITECTURES = Path(__file__).parents[1] / "architectures"  # configurations of aliases, and the aliases' hub ids
ALIASES: dict[str, str] = {
    "demo": str(DEMO_FOLDER),
    **json.loads((ARCHITECTURES / "aliases.json").read_text(encoding="utf-8")),
}
YARN = "-yarn"  # how aliases end of models that are stretched as their page says, by these RoPE parameters
STRETCHED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
STRETCHED_TO = 131072  # tokens
TOKENIZER_FILES = "put tokenizer.json and what belongs to it beside the model's config.json"
SAMPLE = "def read(path): return 12"  # every tokenizer makes several tokens of it
SUFFIX = ".gguf"
SPACES = ("▁", "Ġ")  # how vocabularies write the space before a word: those of SentencePiece, and those of bytes
WORDS = ("people", "because", "between", "different", "important", "capital", "country", "system", "France", "return")

log = logging.getLogger("calibrate")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be measured.

    name: as the user gave it. model: transformers', which can be called like any other if `weights.resident`; else its
    parameters are on the meta device, and `weights` puts them on `weights.device` part by part. fingerprint: a hash
    that names the weights in a profile. random: whether they are random ones.
    """

    name: str
    model: Any
    tokenizer: Any
    geometry: Geometry
    fingerprint: str
    weights: Weights
    random: bool = False


def resolve(name: str) -> str:
    """Return the folder, GGUF file or hub id behind a name. Raises ModelError, with the nearest aliases, if none is."""
    if name in ALIASES:
        return ALIASES[name]
    name = _existing(name)
    if Path(name).is_file():
        if Path(name).suffix != SUFFIX:
            raise ModelError(f"model {name} is a file that is no GGUF file: give a folder, a GGUF file or a hub id")
        return name
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise ModelError(f"folder {name} holds no config.json: give a folder that transformers can load")
        return name
    if (name.count("/") == 1 and not name.endswith("/")) or (name.endswith(SUFFIX) and name.count("/") >= 2):
        return name
    hint = did_you_mean(name, ALIASES, "s2o-calibrate --list-models lists the aliases.")
    raise ModelError(f"model {name!r} is not known: {hint} A local folder or a hub id (org/name) works too")


def _existing(name: str) -> str:
    """Expand the ~ of a name. Raises ModelError for what is written as a path where nothing is."""
    path = os.path.expanduser(name)
    is_path = name.startswith((".", "/", "~")) or (name.count("/") > 1 and not name.endswith(SUFFIX))
    if is_path and not os.path.exists(path):
        raise ModelError(f"{name} does not exist: check the path, or give a hub id (org/name)")
    return path


def in_full(name: str) -> str:
    """Return a model's name, and behind an alias its hub id; the demo model comes with the package."""
    return f"{name} = {ALIASES[name]}" if name in ALIASES and name != "demo" else name


def is_gguf(name: str) -> bool:
    """Return whether a name is that of a GGUF file, here or on the Hub."""
    return name.endswith(SUFFIX) and not Path(name).is_dir()


def find_shipped_config(name: str) -> Path | None:
    """Return the configuration of an alias that is part of this package."""
    path = ARCHITECTURES / f"{name.removesuffix(YARN)}.json"
    return path if name in ALIASES and path.is_file() else None


def _find_source(name: str) -> tuple[str, dict[str, Any]]:
    """Return the arguments of `from_pretrained`: a folder or hub id, and for a GGUF file its name in it."""
    path = resolve(name)
    if not is_gguf(path):
        return path, {}
    if Path(path).is_file():
        return str(Path(path).parent), {"gguf_file": Path(path).name}
    organisation, repository, file = path.split("/", 2)
    return f"{organisation}/{repository}", {"gguf_file": file}


def load_config(name: str, *, random_weights: bool = False, trust_remote_code: bool = False) -> Any:
    """Load a model's configuration by an alias, a local folder, a GGUF file or a hub id.

    random_weights: only the architecture is needed. trust_remote_code: code that comes with the model may run.

    Raises:
        ModelError: It cannot be loaded, has no layer of full attention, or needs code of its own that is not trusted.
        ResourceError: The Hub cannot be reached, or a package that reads the weights is missing.
    """
    from transformers import AutoConfig

    shipped = find_shipped_config(name) if random_weights else None
    source, options = (str(shipped), {}) if shipped else _find_source(name)
    # without either, transformers fails after minutes
    if options and (missing := [package for package in ("gguf", "accelerate") if find_spec(package) is None]):
        raise ResourceError(
            f"model {name!r} is a GGUF file, and {' and '.join(missing)}, which it is read with, cannot be imported: "
            "in the clone, pip install '.[gguf]'"
        )
    with _wrap_errors(name, source):
        _ask_hub(source, options.get("gguf_file", "config.json"))
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, **options)
    if name in ALIASES and name.endswith(YARN):
        config.rope_parameters = config.rope_parameters | STRETCHED
        config.max_position_embeddings = STRETCHED_TO
    geometry(config)  # raises ModelError without full attention
    if not random_weights:
        check_quantisation(config, name)
    return config


def load_tokenizer(
    name: str, *, random_weights: bool = False, trust_remote_code: bool = False, tokenizer: str | None = None
) -> Any:
    """Load a model's tokenizer; the demo model's if the weights are random and the model has none at hand.

    The arguments are those of `load_config`, and the folder or hub id of a `tokenizer` to use in place of the model's.
    Raises ModelError if it is not known, cannot be loaded, or makes other tokens than a GGUF file's.
    """
    if random_weights and tokenizer is None and find_shipped_config(name):
        tokenizer = str(DEMO_FOLDER)
    read = _read_once if is_gguf(name) else _read_tokenizer  # a GGUF file's takes half a minute
    return read(name, random_weights, trust_remote_code, tokenizer)


def _read_tokenizer(name: str, random_weights: bool, trust_remote_code: bool, own: str | None) -> Any:
    from transformers import AutoTokenizer

    source, options = _find_source(name) if own is None else (_existing(ALIASES.get(own, own)), {})
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **options)
        problem = _check_reading(tokenizer)
        cause: Exception | None = None
    except (OSError, ValueError, ImportError) as error:
        if not random_weights:
            _refuse_code(name, error)
        problem, cause = get_first_line(error), error
        if problem.rstrip().endswith("one of:"):  # and a list of what transformers tried
            problem = f"its files are missing: {TOKENIZER_FILES}"
    if problem is None:
        if is_gguf(name) and not random_weights and (wrong := compare_tokens(tokenizer, *_read_vocabulary(name))):
            raise ModelError(
                f"the tokenizer that transformers {'makes' if own is None else 'loads'} for {name!r} is not the "
                f"file's: {wrong}; give --tokenizer and the folder of the model that the file was made of"
            )
        return tokenizer
    if random_weights and own is None:
        log.warning("the tokenizer of %r cannot be loaded: random weights read the demo model's tokens", name)
        return AutoTokenizer.from_pretrained(DEMO_FOLDER)
    raise ModelError(f"the tokenizer of {own or name!r} cannot be loaded: {problem}") from cause


_read_once = lru_cache(maxsize=1)(_read_tokenizer)


def _read_vocabulary(name: str) -> tuple[dict[str, int], bool | None]:
    """Read the token ids of a GGUF file by their texts, and whether it asks for a BOS, None if it does not say."""
    from gguf import GGUFReader
    from transformers.utils.hub import cached_file

    source, options = _find_source(name)
    with _wrap_errors(name, source):
        fields = GGUFReader(cached_file(source, options["gguf_file"])).fields
    tokens, adds_bos = (fields.get(f"tokenizer.ggml.{key}") for key in ("tokens", "add_bos_token"))
    ids = {token: number for number, token in enumerate(tokens.contents() if tokens else ())}
    return ids, None if adds_bos is None else bool(adds_bos.contents())


def compare_tokens(tokenizer: Any, ids: Mapping[str, int], adds_bos: bool | None) -> str | None:
    """Return how a tokenizer differs from a GGUF file's vocabulary; None if it is right.

    Common words that are one token in the vocabulary must come out as that token, and a BOS must if the file says so.
    """
    for word in WORDS:
        expected = next((ids[space + word] for space in SPACES if space + word in ids), None)
        tokens = tokenizer(f"a {word}", add_special_tokens=False).input_ids
        if expected is not None and tokens[-1] != expected:
            return f"it makes the tokens {tokens} of 'a {word}', where the file has token {expected} for the last word"
    if adds_bos is None or adds_bos == (tokenizer.bos_token_id in tokenizer("a").input_ids[:1]):
        return None
    if adds_bos:
        return "it puts no BOS before a text, as the file asks"
    return "it puts a BOS before a text, which the file does not ask for"


def _check_reading(tokenizer: Any) -> str | None:
    """Return why a tokenizer cannot make prompts; None if it can."""
    if not callable(tokenizer):
        return f"{type(tokenizer).__name__} is no tokenizer"
    try:
        ids = tokenizer(SAMPLE, add_special_tokens=False, return_offsets_mapping=True).input_ids
    except NotImplementedError:
        return f"{type(tokenizer).__name__} does not say where in a text its tokens are, as a fast tokenizer does"
    except (TypeError, ValueError, AttributeError, KeyError, IndexError):
        return f"{type(tokenizer).__name__} reads no text"
    # transformers makes some tokenizers without any files, with no words
    return None if len(set(ids)) > 1 else f"its files are missing or hold no words: {TOKENIZER_FILES}"


def load(
    name: str,
    device: str,
    *,
    random_weights: bool = False,
    seed: int = 0,
    resident: bool | None = None,
    trust_remote_code: bool = False,
    tokenizer: str | None = None,
) -> LoadedModel:
    """Load a model: in bfloat16 on a GPU, in float32 on a CPU; quantised weights as they are.

    A checkpoint in safetensors files that hold the model's own parameters may go through the device one layer at a
    time. All others are loaded as a whole, by transformers. `load_config` and `load_tokenizer` explain the arguments.

    Args:
        random_weights: take only the architecture, and draw weights from a `seed`.
        resident: whether all weights stay on the device, so that `model` can be called; None keeps them if they take
            a quarter of the memory or less, or cannot go layer by layer.

    Raises:
        ModelError: The model cannot be found, downloaded or read, or is not supported.
        ResourceError: It is loaded as a whole and memory does not suffice.
    """
    config = load_config(name, random_weights=random_weights, trust_remote_code=trust_remote_code)
    reader = load_tokenizer(
        name, random_weights=random_weights, trust_remote_code=trust_remote_code, tokenizer=tokenizer
    )
    vocabulary = get_text_config(config).vocab_size
    if (random_weights or tokenizer is not None) and len(reader) > vocabulary:
        raise ModelError(
            f"model {name!r} has a vocabulary of {vocabulary}, its prompts are made of {len(reader)} tokens: "
            "give it a tokenizer of its own"
        )
    torch_device = torch.device(device)
    source, options = ("", {}) if random_weights else _find_source(name)
    if not options and (random_weights or find_quantisation(config) is None):
        model = build_skeleton(config, torch.bfloat16 if torch_device.type == "cuda" else torch.float32, torch_device)
        parameters = RandomWeights(model, seed) if random_weights else _find_checkpoint(name, source, model)
        if parameters is not None:
            weights = Weights(model, parameters, torch_device, resident)
            return LoadedModel(name, model, reader, geometry(config), weights.fingerprint, weights, random_weights)
    with _wrap_errors(name, source):
        model = load_whole(source, config, torch_device, name, trust_remote_code=trust_remote_code, **options)
    return from_memory(model, reader, name)


def from_memory(model: Any, tokenizer: Any, name: str | None = None) -> LoadedModel:
    """Take a transformers model that is loaded already: quantised, with adapters, spread over like GPUs or as it is.

    Args:
        model: in evaluation mode, all of its parameters in memory; else, or without full attention, a ModelError.
        tokenizer: the model's tokenizer, or the processor of a model with further inputs.
        name: in profiles; by default what it was loaded from, or its class.
    """
    if not hasattr(model, "config") or not hasattr(model, "get_decoder"):
        raise ModelError(f"{type(model).__name__} is no transformers model: load it with AutoModelForCausalLM")
    if tokenizer is None:
        raise ModelError(f"the tokenizer of {type(model).__name__} is missing: give it beside the model")
    if model.training:
        raise ModelError("the model is in training mode, expected evaluation: call model.eval()")
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if (problem := _check_reading(tokenizer)) is not None:
        raise ModelError(f"the tokenizer of {type(model).__name__} cannot be used: {problem}; give the model's own")
    shape, weights = geometry(model.config), InMemory(model)
    name = name or getattr(model.config, "_name_or_path", "") or type(model).__name__
    return LoadedModel(name, model, tokenizer, shape, weights.fingerprint, weights)


def _find_checkpoint(name: str, source: str, model: Any) -> Checkpoint | None:
    """Find the safetensors files with the weights, downloaded if need be; None if they cannot go layer by layer.

    The model gets the generation settings beside them.
    """
    from transformers import GenerationConfig
    from transformers.utils.hub import cached_file
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    def find(file: str) -> str | None:
        with _wrap_errors(name, source):
            path: str | None = cached_file(source, file, _raise_exceptions_for_missing_entries=False)
        return path

    if find("generation_config.json") is not None:
        with _wrap_errors(name, source):
            model.generation_config = GenerationConfig.from_pretrained(source)
    others = ("pytorch_model.bin", "pytorch_model.bin.index.json")
    if find(SINGLE) is None and find(INDEX) is None and any(find(file) for file in others):
        return None
    checkpoint = Checkpoint(find)
    return checkpoint if explain_no_streaming(model.config, model, checkpoint.names) is None else None


@contextmanager
def _wrap_errors(name: str, source: str) -> Iterator[None]:
    """Turn what transformers raises into one sentence."""
    try:
        yield
    except ModelError:
        raise
    except (OSError, ValueError, ImportError) as error:
        _refuse_code(name, error)
        if _is_unreachable(error):
            raise ResourceError(
                f"model {name!r} cannot be loaded from {source}: the Hub cannot be reached and there is no copy of it "
                "here; try again with a network, or give a local folder or a GGUF file; the sizes of an alias such as "
                "qwen2.5-7b suffice for a plan (--dry-run) and to rehearse (--random-weights)"
            ) from error
        raise ModelError(f"model {name!r} cannot be loaded from {source}: {get_first_line(error)}") from error


def _ask_hub(source: str, file: str) -> None:
    """Ask the Hub once, with a line in the log, unless the file is here. Raises ConnectionError without an answer."""
    import httpx
    from huggingface_hub import constants, get_session, try_to_load_from_cache

    if Path(source).exists() or constants.HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(source, file), str):
        return
    log.warning("asking the Hub for %s", source)
    try:  # transformers would try for half a minute, without a word
        get_session().head(constants.ENDPOINT, timeout=5.0)
    except httpx.TransportError as error:
        raise ConnectionError(str(error)) from error


def _is_unreachable(error: BaseException) -> bool:
    """Return whether transformers failed because the Hub is out of reach, or not allowed (HF_HUB_OFFLINE)."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    unreachable = isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError))
    return unreachable or (error.__cause__ is not None and _is_unreachable(error.__cause__))


def _refuse_code(name: str, error: Exception) -> None:
    """Raise ModelError if transformers said that the model has code of its own."""
    if "trust_remote_code" in str(error):
        raise ModelError(
            f"model {name!r} comes with code of its own, which is not run: give --trust-remote-code if you have read "
            "and trust it"
        ) from error
