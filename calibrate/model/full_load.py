"""Checkpoints that are loaded as a whole, by transformers itself: what cannot go through the device layer by layer."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

import torch

from calibrate.model.weights import model_class, persistent_buffers
from s2o_runtime.errors import ModelError, ResourceError, first_line


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
