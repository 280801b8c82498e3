"""Read a checkpoint's weights layer by layer, or the whole of what only transformers converts."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from s2o_runtime.errors import ModelError, ResourceError, first_line
from s2o_runtime.identity import (
    RANDOM,
    compose_fingerprint,
    fingerprint,
    geometry,
    offloaded,
    sampled_fingerprint,
    stored_tensors,
)

RESIDENT_SHARE = 4  # a model stays on the device if its weights take no more than this part of the memory: a quarter
ELSEWHERE = 80 << 30  # bytes of memory of a GPU that is not here
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
READABLE = ("F64", "F32", "F16", "BF16")


class Source(Protocol):
    """Where a model's parameters come from. `blank` is the parameter of the skeleton that is to be filled."""

    def read(self, name: str, blank: nn.Parameter, device: torch.device) -> Tensor:
        """The parameter of this name, in the shape and dtype of `blank`, on this device."""

    def fingerprint(self, blanks: Mapping[str, nn.Parameter]) -> str:
        """The hash that names these weights in a profile."""


def skeleton(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The model of a configuration, with all parameters on the meta device and its buffers on `device`.

    Raises:
        ModelError: Transformers has no text model of this configuration, or does not say what its buffers hold.
    """
    with torch.device("meta"):
        model = _from_config(config, dtype)
        model.tie_weights()  # transformers before 5.2 leaves that to loading
    for name, module in model.named_modules():
        if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
            _fill_buffers(model, name, module, device)
    return model.requires_grad_(False)


def model_class(config: Any) -> Any:
    """The automatic class of transformers that makes the model of a configuration: of text, or of images and text.

    Raises:
        ModelError: Transformers has neither.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    for auto_class in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto_class._model_mapping or auto_class.__name__ in (
            getattr(config, "auto_map", None) or {}
        ):
            return auto_class
    raise ModelError(
        f"transformers has no model that generates text of type {getattr(config, 'model_type', '?')!r}: use another"
    )


def _from_config(config: Any, dtype: torch.dtype) -> Any:
    """The model with SDPA, or where its attention is beyond SDPA (soft caps, sinks) with its own eager attention.

    Code that comes with the model is that of its configuration, which was trusted, or none.
    """
    auto_class, config = model_class(config), copy.deepcopy(config)  # transformers writes the dtype into it
    options = {"dtype": dtype, "trust_remote_code": type(config).__module__.startswith("transformers_modules")}
    try:
        return auto_class.from_config(config, attn_implementation="sdpa", **options).eval()
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return auto_class.from_config(config, attn_implementation="eager", **options).eval()


def _fill_buffers(model: Any, name: str, module: nn.Module, device: torch.device) -> None:
    """Give a module's buffers the values that the architecture initialises them with.

    Rotary embeddings are made again, because that gives them the very bits that they have in a model that is loaded.
    """
    if "RotaryEmbedding" in type(module).__name__ and hasattr(module, "config"):
        made_again = type(module)(config=module.config)
        module._buffers.update({key: buffer.to(device) for key, buffer in made_again.named_buffers(recurse=False)})
        return
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            filling = torch.nan if buffer.is_floating_point() else -1
            module._buffers[key] = torch.full(buffer.shape, filling, dtype=buffer.dtype, device=device)
    with torch.no_grad():
        _initialiser(model, name)(module)
    for key, buffer in module._buffers.items():
        if buffer is None or not buffer.numel():
            continue
        unset = buffer.isnan() if buffer.is_floating_point() else buffer == -1
        if bool(unset.all()):
            raise ModelError(f"buffer {name}.{key} of {type(model).__name__} is in no checkpoint: it is not supported")


def _initialiser(model: Any, name: str) -> Callable[[nn.Module], object]:
    """What initialises the module of this name: the method of the innermost transformers model that holds it."""
    initialise = model._init_weights
    parts = name.split(".")
    for depth in range(1, len(parts)):
        holder = model.get_submodule(".".join(parts[:depth]))
        initialise = getattr(holder, "_init_weights", initialise)
    return cast(Callable[[nn.Module], object], initialise)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a checkpoint of the model holds beside its parameters, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


class Weights:
    """The parameters of a `skeleton`, on the device only while they are needed.

    Args:
        model: the skeleton.
        source: where its parameters come from.
        device: where they are put.
        resident: put all of them there at once and let them stay, so that the model is one like any other; None
            decides by `stays_resident`.

    Attributes:
        keeps_last: what `on_device` put there last stays until other parts are needed, or `release`. So several items
            of work on one layer read its weights once.
    """

    def __init__(self, model: Any, source: Source, device: torch.device, resident: bool | None = None) -> None:
        self.model, self.source, self.device = model, source, device
        self._blanks: dict[str, nn.Parameter] = dict(model.named_parameters())
        names = {id(blank): name for name, blank in self._blanks.items()}
        self._attributes: dict[nn.Module, dict[str, str]] = {  # module -> its attributes -> their parameters' names
            module: {attribute: names[id(blank)] for attribute, blank in module.named_parameters(recurse=False)}
            for module in model.modules()
        }
        self.resident = False
        self.keeps_last = False
        self._last: tuple[nn.Module, ...] = ()
        if stays_resident(self.bytes, device) if resident is None else resident:
            self._put(model)
            self.resident = True

    @property
    def bytes(self) -> int:
        """The bytes that all parameters take on the device."""
        return sum(blank.numel() * blank.element_size() for blank in self._blanks.values())

    @property
    def held(self) -> int:
        """The bytes that are on the device all the time."""
        return self.bytes if self.resident else 0

    @property
    def fingerprint(self) -> str:
        """The same as `s2o_runtime.identity.fingerprint` of the whole model, for weights from a checkpoint."""
        return compose_fingerprint(self.source.fingerprint(self._blanks), self.model.config)

    @contextmanager
    def on_device(self, *parts: nn.Module) -> Iterator[None]:
        """The parameters of these modules are on the device inside the block, and back on meta after it."""
        if self.resident or (parts and parts == self._last):
            yield
            return
        self.release()
        try:
            for part in parts:
                self._put(part)
            if self.keeps_last:
                self._last = parts
            yield
        finally:
            if parts != self._last:
                for part in parts:
                    self._take(part)

    def release(self) -> None:
        """Take away what was kept because it was used last."""
        for part in self._last:
            self._take(part)
        self._last = ()

    def _put(self, part: nn.Module) -> None:
        names = dict.fromkeys(name for module in part.modules() for name in self._attributes[module].values())
        values = {name: self.source.read(name, self._blanks[name], self.device) for name in names}
        self._set(part, {name: nn.Parameter(value, requires_grad=False) for name, value in values.items()})

    def _take(self, part: nn.Module) -> None:
        self._set(part, self._blanks)

    def _set(self, part: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        for module in part.modules():
            for attribute, name in self._attributes[module].items():
                setattr(module, attribute, parameters[name])


class InMemory:
    """A model's parameters that are in memory all the time, wherever they are; used as `Weights` is.

    Args:
        model: a transformers model with all of its parameters.

    Raises:
        ModelError: Some parameters are not in memory.
    """

    resident = True
    keeps_last = False

    def __init__(self, model: Any) -> None:
        if (missing := offloaded(model)) is not None:
            raise ModelError(f"{missing}: load the model without offloading")
        self.model = model
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.fingerprint = fingerprint(model)

    @property
    def bytes(self) -> int:
        """The bytes of all parameters and buffers."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def held(self) -> int:
        return self.bytes

    @contextmanager
    def on_device(self, *parts: nn.Module) -> Iterator[None]:
        """Nothing to do: the parameters are where they run."""
        yield

    def release(self) -> None:
        """Nothing to do either."""


def stays_resident(weights: int, device: torch.device, elsewhere: int = 0) -> bool:
    """Whether a whole model stays on the device: its bytes are at most a quarter of the memory.

    On a GPU that is a quarter of the free memory; on a CPU of all memory, because there the file cache counts as used.
    A GPU elsewhere, which a plan is for, has so many bytes; where that is not known, `ELSEWHERE`.
    """
    if elsewhere or (device.type == "cuda" and not torch.cuda.is_available()):
        memory = elsewhere or ELSEWHERE
    elif device.type == "cuda":
        memory, _ = torch.cuda.mem_get_info(device)
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return weights * RESIDENT_SHARE <= memory


class Checkpoint:
    """Weights in safetensors files, one file or several with an index.

    A file is opened when its first tensor is asked for, and mapped: only what is read moves.

    Args:
        find: gives the path of a file by its name, or None if the checkpoint has no such file.

    Raises:
        ModelError: There are no weights, or an index cannot be read.
    """

    def __init__(self, find: Callable[[str], str | None]) -> None:
        self._find = find
        self._files: dict[str, Any] = {}
        if find(SINGLE) is not None:
            self._file_of = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        else:
            index = find(INDEX)
            if index is None:
                raise ModelError(f"the checkpoint has neither {SINGLE} nor {INDEX}: convert it to safetensors")
            self._file_of = _read_index(Path(index))

    @property
    def names(self) -> Collection[str]:
        """The tensors that the checkpoint holds."""
        return self._file_of.keys()

    def read(self, name: str, blank: nn.Parameter, device: torch.device) -> Tensor:
        stored = self._slice(name, blank)
        with _readable(self._file_of[name]):
            value: Tensor = stored[:]
        return value.to(device, copy=True).to(blank.dtype)

    def fingerprint(self, blanks: Mapping[str, nn.Parameter]) -> str:
        tensors_of = cache(lambda file: stored_tensors(Path(str(self._find(file)))))

        def sample(name: str, indices: range) -> Tensor:
            self._slice(name, blanks[name])  # refuses what the model does not expect
            file = self._file_of[name]
            with _readable(file):
                return tensors_of(file)[name].elements(indices).to(blanks[name].dtype)

        return sampled_fingerprint({name: blank.shape for name, blank in blanks.items()}, sample)

    def _slice(self, name: str, blank: nn.Parameter) -> Any:
        """A tensor of the checkpoint, not read yet, checked to be what the model expects."""
        if name not in self._file_of:
            raise ModelError(f"the checkpoint has no tensor {name}, which its config.json asks for: download it again")
        file = self._file_of[name]
        with _readable(file):
            stored = self._open(file).get_slice(name)
        if stored.get_shape() != list(blank.shape):
            raise ModelError(
                f"tensor {name} in {file} is {stored.get_shape()}, expected {list(blank.shape)}: "
                "the checkpoint does not belong to its config.json"
            )
        if stored.get_dtype() not in READABLE:
            raise ModelError(
                f"tensor {name} in {file} is of type {stored.get_dtype()}, expected one of {', '.join(READABLE)}: "
                "use a checkpoint that is not quantised"
            )
        return stored

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self._find(file)
            if path is None:
                raise ModelError(f"the checkpoint has no file {file}, which {INDEX} names: download it again")
            with _readable(file):
                self._files[file] = safe_open(path, framework="pt")
        return self._files[file]


def _read_index(path: Path) -> dict[str, str]:
    """Which file holds which tensor."""
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in names.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is not an index of safetensors files ({error}): download it again") from error


@contextmanager
def _readable(file: str) -> Iterator[None]:
    """Turns what safetensors raises into one sentence."""
    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read ({error}): it is damaged or cut off, download it again") from error


class RandomWeights:
    """Weights as the architecture initialises them, each a function of the seed and its name alone.

    A layer that is drawn twice is therefore the same twice. A GPU draws other numbers than a CPU.
    """

    def __init__(self, model: Any, seed: int) -> None:
        self._model, self._seed = model, seed

    @torch.no_grad()
    def read(self, name: str, blank: nn.Parameter, device: torch.device) -> Tensor:
        path, _, attribute = name.rpartition(".")
        module = copy.deepcopy(self._model.get_submodule(path)).to_empty(device=device)
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(int.from_bytes(digest[:7], "little"))
            _initialiser(self._model, path)(module)
        value: Tensor = getattr(module, attribute).detach()
        return value

    def fingerprint(self, blanks: Mapping[str, nn.Parameter]) -> str:
        """A text that names seed and sizes; no trained model's fingerprint begins like it."""
        sizes = sorted((name, tuple(blank.shape)) for name, blank in blanks.items())
        architecture = repr((geometry(self._model.config), sizes))
        return f"{RANDOM}{self._seed}-{hashlib.sha256(architecture.encode()).hexdigest()[:16]}"


def quantisation(config: Any) -> str | None:
    """The format that a checkpoint's weights are quantised in, by transformers' name ("gptq", "fp8"); None if none."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    return str(getattr(method, "value", method) or "an unnamed format")


def check_quantisation(config: Any, name: str) -> None:
    """Check, before anything is downloaded, that what a quantised checkpoint needs is installed.

    Args:
        config: the model's transformers configuration.
        name: the model, as the user gave it.

    Raises:
        ModelError: Transformers does not know the format.
        ResourceError: A package is missing.
    """
    method = quantisation(config)
    if method is None:
        return
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        AutoHfQuantizer.from_config(config.quantization_config, pre_quantized=True).validate_environment(
            dtype=torch.bfloat16, device_map=None, weights_conversion=None
        )
    except ImportError as error:
        if "requires a GPU" in str(error):  # no package helps
            raise _not_on("cpu", name, config, error) from error
        raise ResourceError(
            f"model {name!r} is quantised ({method}) and a package for that is missing ({first_line(error)}): "
            "install it"
        ) from error
    except ValueError as error:
        if "nknown quantization" in str(error):
            raise ModelError(
                f"model {name!r} is quantised in a format that transformers does not know: {method}"
            ) from error
    except RuntimeError:  # what it needs of the device is said when the weights are loaded
        pass


def streaming_obstacle(config: Any, model: Any, names: Collection[str] | None) -> str | None:
    """Why a checkpoint cannot be read one layer at a time; None if it can.

    Args:
        config: the model's configuration.
        model: its skeleton.
        names: the tensors in the safetensors files; None if there are no such files, or if they are not known yet.
    """
    method = quantisation(config)
    if method is not None:
        return f"its weights are quantised ({method})"
    stored = persistent_buffers(model)
    if stored:
        return f"it keeps more than parameters ({next(iter(stored))})"
    if names is not None:
        lacking = (name for name, _ in model.named_parameters() if name not in names)
        converted = next((name for name in lacking if _is_converted(name, names)), None)
        if converted is not None:
            return f"transformers makes its tensors of others ({converted})"
    return None


def load_whole(source: str, config: Any, device: torch.device, name: str, **options: Any) -> Any:
    """A checkpoint as transformers loads it, with all of its parameters on the device.

    Args:
        source: a folder or a hub id.
        config: the model's configuration.
        device: where it shall be.
        name: the model, as the user gave it.
        **options: for `from_pretrained`, such as `gguf_file`.

    Raises:
        ModelError: The checkpoint lacks parameters of the model, or its format needs another device.
        ResourceError: A package that reads it is missing, or the device's memory does not suffice.
        OSError, ValueError: What transformers says of files that it cannot read.
    """
    quantised = quantisation(config) is not None
    dtype: Any = torch.bfloat16 if device.type == "cuda" else torch.float32
    options |= {"dtype": "auto" if quantised else dtype, "output_loading_info": True}
    if device.type == "cuda" and (quantised or find_spec("accelerate") is not None):
        options["device_map"] = {"": str(device)}  # without a copy in the host's memory
    if "gguf_file" not in options:
        options["config"] = config
    try:
        model, info = model_class(config).from_pretrained(source, **options)
        if "device_map" not in options:
            model = model.to(device)
    except ImportError as error:
        raise ResourceError(
            f"model {name!r} needs a package that is missing ({first_line(error)}): install it"
        ) from error
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"model {name!r} is loaded as a whole, for which the memory of {device} does not suffice: use a larger "
            "GPU, or load it over several and call calibrate.calibrate(model, tokenizer)"
        ) from error
    except RuntimeError as error:
        if not quantised:
            raise
        raise _not_on(device.type, name, config, error) from error
    if missing := sorted(info.get("missing_keys") or ()):
        raise ModelError(
            f"the checkpoint of {name!r} has no tensor {missing[0]}, which its config asks for: download it again"
        )
    return model.eval().requires_grad_(False)


def _not_on(device: str, name: str, config: Any, error: Exception) -> ModelError:
    return ModelError(
        f"model {name!r} is quantised ({quantisation(config)}) in a format that cannot be loaded on a {device} device "
        f"({first_line(error)}): use another device, or a checkpoint in another format"
    )


def _is_converted(lacking: str, names: Collection[str]) -> bool:
    """Whether a parameter that a checkpoint lacks is one that transformers makes of tensors with other names.

    A checkpoint that has others under the parameter's module, or nothing of its layer at all under this prefix, is one
    of a model whose tensors are merged or renamed; else the tensor is simply missing.
    """
    module = lacking.rpartition(".")[0]
    return any(name.startswith(f"{module}.") for name in names) or not any(
        name.startswith(module.rpartition(".")[0]) for name in names
    )
