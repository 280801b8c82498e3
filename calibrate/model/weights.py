"""Read a checkpoint's weights layer by layer, or the whole of what only transformers converts."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from s2o_runtime.errors import ModelError, ResourceError, get_first_line
from s2o_runtime.identity import (
    RANDOM,
    compose_fingerprint,
    compute_sampled_fingerprint,
    find_offloaded,
    fingerprint,
    geometry,
    read_stored_tensors,
)

RESIDENT_SHARE = 4  # a model stays on the device if its weights take no more than this part of the memory: a quarter
ELSEWHERE = 80 << 30  # bytes of memory of a GPU that is not here
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
READABLE = ("F64", "F32", "F16", "BF16")


def build_skeleton(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Make the model of a configuration, with all parameters on the meta device and its buffers on `device`.

    It has SDPA, or where its attention is beyond SDPA (soft caps, sinks) its own eager attention. Code that comes with
    the model is that of its configuration, which was trusted, or none. Raises ModelError if transformers has no text
    model of this configuration, or does not say what its buffers hold.
    """
    auto_class, config = get_model_class(config), copy.deepcopy(config)  # transformers writes the dtype into it
    options = {"dtype": dtype, "trust_remote_code": type(config).__module__.startswith("transformers_modules")}
    with torch.device("meta"):
        try:
            model = auto_class.from_config(config, attn_implementation="sdpa", **options).eval()
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            model = auto_class.from_config(config, attn_implementation="eager", **options).eval()
        model.tie_weights()  # transformers before 5.2 leaves that to loading
    for name, module in model.named_modules():
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            _fill_buffers(model, name, module, device)
    return model.requires_grad_(False)


def get_model_class(config: Any) -> Any:
    """Return transformers' automatic class for a configuration of text, or of images and text, or raise ModelError."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    own = getattr(config, "auto_map", None) or {}
    for auto_class in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto_class._model_mapping or auto_class.__name__ in own:
            return auto_class
    raise ModelError(
        f"transformers has no model that generates text of type {getattr(config, 'model_type', '?')!r}: use another"
    )


def _fill_buffers(model: Any, name: str, module: nn.Module, device: torch.device) -> None:
    """Give a module's buffers the values that the architecture initialises them with."""
    if "RotaryEmbedding" in type(module).__name__ and hasattr(module, "config"):
        # made again, which gives its buffers the very bits that they have in a model that is loaded
        fresh = type(module)(config=module.config)
        module._buffers.update({key: buffer.to(device) for key, buffer in fresh.named_buffers(recurse=False)})
        return
    for key, buffer in module.named_buffers(recurse=False):
        if buffer.is_meta:
            filling = torch.nan if buffer.is_floating_point() else -1
            module._buffers[key] = torch.full(buffer.shape, filling, dtype=buffer.dtype, device=device)
    _initialise(model, name, module)
    for key, buffer in module.named_buffers(recurse=False):
        unset = buffer.isnan() if buffer.is_floating_point() else buffer == -1
        if buffer.numel() and bool(unset.all()):
            raise ModelError(f"buffer {name}.{key} of {type(model).__name__} is in no checkpoint: it is not supported")


@torch.no_grad()
def _initialise(model: Any, name: str, module: nn.Module) -> None:
    """Initialise a module as the innermost transformers model that holds `name` does."""
    parts = name.split(".")
    holders = [model, *(model.get_submodule(".".join(parts[:depth])) for depth in range(1, len(parts)))]
    innermost = next(holder for holder in reversed(holders) if hasattr(holder, "_init_weights"))
    innermost._init_weights(module)


class Weights:
    """The parameters that a `source` has for a skeleton, `model`, on the device only while they are needed.

    resident: put all of them there at once and let them stay, so that the model is one like any other; None decides by
    `decide_resident`.
    """

    resident = False
    # parameters that `put_on_device` put there last stay until others are needed, or `release`: so several items of
    # work on one layer read its weights once
    keeps_last = False
    _last: tuple[nn.Module, ...] = ()

    def __init__(
        self, model: Any, source: Checkpoint | RandomWeights, device: torch.device, resident: bool | None = None
    ) -> None:
        self.model, self.source, self.device = model, source, device
        self._blanks: dict[str, nn.Parameter] = dict(model.named_parameters())
        names = {id(blank): name for name, blank in self._blanks.items()}
        self._attributes: dict[nn.Module, dict[str, str]] = {  # module -> its attributes -> their parameters' names
            module: {attribute: names[id(blank)] for attribute, blank in module.named_parameters(recurse=False)}
            for module in model.modules()
        }
        if decide_resident(self.bytes, device) if resident is None else resident:
            self._put(model)
            self.resident = True

    @property
    def bytes(self) -> int:
        """The bytes that all parameters and buffers take on the device."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def held(self) -> int:
        """The bytes that are on the device all the time."""
        return self.bytes if self.resident else 0

    @cached_property
    def fingerprint(self) -> str:
        """The same as `s2o_runtime.identity.fingerprint` of the whole model, for weights from a checkpoint."""
        return compose_fingerprint(self.source.fingerprint(self._blanks), self.model.config)

    @contextmanager
    def put_on_device(self, *parts: nn.Module) -> Iterator[None]:
        """Put the parameters of these modules on the device inside the block; they are back on meta after it."""
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
                self._take(*parts)

    def release(self) -> None:
        """Take away the parameters that were kept because they were used last."""
        self._take(*self._last)
        self._last = ()

    def _put(self, part: nn.Module) -> None:
        names = dict.fromkeys(name for module in part.modules() for name in self._attributes[module].values())
        values = {name: self.source.read(name, self._blanks[name], self.device) for name in names}
        self._set(part, {name: nn.Parameter(value, requires_grad=False) for name, value in values.items()})

    def _take(self, *parts: nn.Module) -> None:
        for part in parts:  # none of a model in memory
            self._set(part, self._blanks)

    def _set(self, part: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        for module in part.modules():
            for attribute, name in self._attributes[module].items():
                setattr(module, attribute, parameters[name])


class InMemory(Weights):
    """Parameters that are in memory all the time, wherever they are. Raises ModelError if some of a model's are not."""

    def __init__(self, model: Any) -> None:
        if (missing := find_offloaded(model)) is not None:
            raise ModelError(f"{missing}: load the model without offloading")
        self.model, self.resident = model, True
        self.device = model.get_input_embeddings().weight.device
        self.fingerprint = fingerprint(model)


def decide_resident(weights: int, device: torch.device, elsewhere: int = 0) -> bool:
    """Return whether a whole model stays on the device: its bytes are at most a quarter of the memory.

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
    """Weights in safetensors files, one file or several with an index, which are mapped: only what is read moves.

    `find` gives the path of a file by its name, or None if the checkpoint has no such file. Raises ModelError if there
    are no weights, or an index cannot be read.
    """

    def __init__(self, find: Callable[[str], str | None]) -> None:
        self._find = find
        self._files: dict[str, Any] = {}
        if find(SINGLE) is not None:
            self._file_of = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
            return
        if (index := find(INDEX)) is None:
            raise ModelError(f"the checkpoint has neither {SINGLE} nor {INDEX}: convert it to safetensors")
        try:
            names = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
            self._file_of = {str(name): str(file) for name, file in names.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is not an index of safetensors files ({error}): download it again") from error

    @property
    def names(self) -> Collection[str]:
        """The tensors that the checkpoint holds."""
        return self._file_of.keys()

    def read(self, name: str, blank: nn.Parameter, device: torch.device) -> Tensor:
        """Read a parameter, in the shape and dtype of the skeleton's."""
        with self._check_tensor(name, blank) as stored:
            value: Tensor = stored[:]
        return value.to(device, copy=True).to(blank.dtype)

    def fingerprint(self, blanks: Mapping[str, nn.Parameter]) -> str:
        """Compute the hash that names these weights in a profile."""
        tensors_of = cache(lambda file: read_stored_tensors(Path(str(self._find(file)))))

        def sample(name: str, indices: range) -> Tensor:
            with self._check_tensor(name, blanks[name]):
                return tensors_of(self._file_of[name])[name].read_elements(indices).to(blanks[name].dtype)

        return compute_sampled_fingerprint({name: blank.shape for name, blank in blanks.items()}, sample)

    @contextmanager
    def _check_tensor(self, name: str, blank: nn.Parameter) -> Iterator[Any]:
        """Yield a tensor, not read yet, of the shape that the model expects; errors inside become one sentence."""
        if name not in self._file_of:
            raise ModelError(f"the checkpoint has no tensor {name}, which its config.json asks for: download it again")
        file = self._file_of[name]
        with _wrap_errors(file):
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
            yield stored

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self._find(file)
            if path is None:
                raise ModelError(f"the checkpoint has no file {file}, which {INDEX} names: download it again")
            with _wrap_errors(file):
                self._files[file] = safe_open(path, framework="pt")
        return self._files[file]


@contextmanager
def _wrap_errors(file: str) -> Iterator[None]:
    """Turn what safetensors raises into one sentence."""
    try:
        yield
    except ModelError:  # a ValueError too
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read ({error}): it is damaged or cut off, download it again") from error


class RandomWeights:
    """Weights as the architecture initialises them, each a function of the seed, its name and the kind of device."""

    def __init__(self, model: Any, seed: int) -> None:
        self._model, self._seed = model, seed

    def read(self, name: str, blank: nn.Parameter, device: torch.device) -> Tensor:
        """Draw a parameter."""
        path, _, attribute = name.rpartition(".")
        module = copy.deepcopy(self._model.get_submodule(path)).to_empty(device=device)
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(int.from_bytes(digest[:7], "little"))
            _initialise(self._model, path, module)
        value: Tensor = getattr(module, attribute).detach()
        return value

    def fingerprint(self, blanks: Mapping[str, nn.Parameter]) -> str:
        """Return a text that names seed and sizes; no trained model's fingerprint begins like it."""
        sizes = sorted((name, tuple(blank.shape)) for name, blank in blanks.items())
        architecture = repr((geometry(self._model.config), sizes))
        return f"{RANDOM}{self._seed}-{hashlib.sha256(architecture.encode()).hexdigest()[:16]}"


def find_quantisation(config: Any) -> str | None:
    """Return the format that weights are quantised in, by transformers' name ("gptq", "fp8"); None if they are not."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    return str(getattr(method, "value", method) or "an unnamed format")


def check_quantisation(config: Any, name: str) -> None:
    """Raise ResourceError if a quantised checkpoint needs a missing package, ModelError if its format is unknown."""
    method = find_quantisation(config)
    if method is None:
        return
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        AutoHfQuantizer.from_config(config.quantization_config, pre_quantized=True).validate_environment(
            dtype=torch.bfloat16, device_map=None, weights_conversion=None
        )
    except ImportError as error:
        if "requires a GPU" in str(error):  # no package helps
            raise _make_device_error("cpu", name, config, error) from error
        raise ResourceError(
            f"model {name!r} is quantised ({method}) and a package for that is missing ({get_first_line(error)}): "
            "install it"
        ) from error
    except ValueError as error:
        if "nknown quantization" in str(error):
            raise ModelError(
                f"model {name!r} is quantised in a format that transformers does not know: {method}"
            ) from error
    except RuntimeError:  # what it needs of the device is said when the weights are loaded
        pass


def explain_no_streaming(config: Any, model: Any, names: Collection[str] | None) -> str | None:
    """Return why a checkpoint cannot be read one layer at a time; None if it can.

    names: the tensors in the safetensors files; None if there are no such files, or if they are not known yet.
    """
    if (method := find_quantisation(config)) is not None:
        return f"its weights are quantised ({method})"
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if (buffer := next((name for name in model.state_dict() if name not in parameters), None)) is not None:
        return f"it keeps more than parameters ({buffer})"
    if names is None:
        return None
    for lacking, _ in model.named_parameters():
        # transformers makes a parameter of others if the checkpoint has some under the parameter's module, or nothing
        # of its layer at all under this prefix; else the tensor is simply missing, which reading it says
        module_name = lacking.rpartition(".")[0]
        layer_name = module_name.rpartition(".")[0]
        if lacking not in names and (
            any(name.startswith(f"{module_name}.") for name in names)
            or not any(name.startswith(layer_name) for name in names)
        ):
            return f"transformers makes its tensors of others ({lacking})"
    return None


def load_whole(source: str, config: Any, device: torch.device, name: str, **options: Any) -> Any:
    """Load a checkpoint by transformers from a folder or hub id, with all of its parameters on the device.

    name: as the user gave it. options: for `from_pretrained`, such as `gguf_file`.

    Raises:
        ModelError: The checkpoint lacks parameters of the model, or its format needs another device.
        ResourceError: A package that reads it is missing, or the device's memory does not suffice.
        OSError, ValueError: What transformers says of files that it cannot read.
    """
    quantised = find_quantisation(config) is not None
    dtype: Any = torch.bfloat16 if device.type == "cuda" else torch.float32
    options |= {"dtype": "auto" if quantised else dtype, "output_loading_info": True}
    if device.type == "cuda" and (quantised or find_spec("accelerate") is not None):
        options["device_map"] = {"": str(device)}  # without a copy in the host's memory
    if "gguf_file" not in options:
        options["config"] = config
    try:
        model, info = get_model_class(config).from_pretrained(source, **options)
        if "device_map" not in options:
            model = model.to(device)
    except ImportError as error:
        raise ResourceError(
            f"model {name!r} needs a package that is missing ({get_first_line(error)}): install it"
        ) from error
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"model {name!r} is loaded as a whole, for which the memory of {device} does not suffice: use a larger "
            "GPU, or load it over several and call calibrate.calibrate(model, tokenizer)"
        ) from error
    except RuntimeError as error:
        if not quantised:
            raise
        raise _make_device_error(device.type, name, config, error) from error
    if missing := sorted(info.get("missing_keys") or ()):
        raise ModelError(
            f"the checkpoint of {name!r} has no tensor {missing[0]}, which its config asks for: download it again"
        )
    return model.eval().requires_grad_(False)


def _make_device_error(device: str, name: str, config: Any, error: Exception) -> ModelError:
    method = find_quantisation(config)
    return ModelError(
        f"model {name!r} is quantised ({method}) in a format that cannot be loaded on a {device} device "
        f"({get_first_line(error)}): use another device, or a checkpoint in another format"
    )
