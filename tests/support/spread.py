"""A model spread over devices that are pretended: all are the CPU, and operations on tensors of two are noted."""

import traceback

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = "pretended_device"  # attribute of a tensor
COPIES = ("copy_", "_to_copy")  # operations that may have tensors of two devices
ROOT = "/calibrate/", "/s2o_runtime/"


def spread(*modules, device):
    """Put modules on a pretended device: their parameters, and copies of all that they are called with from now on."""

    def moved(value):
        if not isinstance(value, torch.Tensor) or getattr(value, DEVICE, None) == device:
            return value
        copy = value.clone()
        setattr(copy, DEVICE, device)
        return copy

    for module in modules:
        for tensor in [*module.parameters(), *module.buffers()]:
            setattr(tensor, DEVICE, device)
        module.register_forward_pre_hook(
            lambda module, arguments, named: (tree_map(moved, arguments), tree_map(moved, named)), with_kwargs=True
        )


class _ToTheHost(TorchFunctionMode):
    """What comes to the host is on no pretended device."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.Tensor.cpu:
            result = result.clone()
            result.__dict__.pop(DEVICE, None)
        return result


class PretendedDevices(TorchDispatchMode):
    """Inside the block results are where their inputs are.

    Tensors that are made of nothing, by `torch.zeros` and the like, are on no device until they meet one.

    mixed: The operations on tensors of two devices, and from which line of the project. seen: The devices.
    """

    def __init__(self):
        super().__init__()
        self.mixed, self.seen, self._host = [], set(), _ToTheHost()

    def __enter__(self):
        self._host.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._host.__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        devices = list(dict.fromkeys(getattr(tensor, DEVICE) for tensor in inputs if hasattr(tensor, DEVICE)))
        self.seen |= set(devices)
        if len(devices) > 1 and not function.__name__.startswith(COPIES):
            lines = [frame for frame in traceback.extract_stack() if any(folder in frame.filename for folder in ROOT)]
            self.mixed.append((function.__name__, f"{lines[-1].filename}:{lines[-1].lineno}" if lines else ""))
        for value in tree_leaves(out) if devices else ():
            if isinstance(value, torch.Tensor) and not hasattr(value, DEVICE):
                setattr(value, DEVICE, devices[0])
        return out
