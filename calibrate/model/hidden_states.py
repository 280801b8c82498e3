"""Hidden states in a folder that several processes share: where prompts are before some layers of the dense model.

A file is written once and never changes, so processes need no locks: whoever finds it may read it. Its name holds the
model's fingerprint, the prompt's hash and the number of the decoder layer that comes next.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from s2o_runtime.errors import ResourceError
from s2o_runtime.files import write_atomically


class HiddenStates:
    """The hidden states of some prompts in a shared folder.

    Args:
        folder: Where files are; it is made if it is missing.
        fingerprint: Of the model.
        prompts: The prompts' hashes.
    """

    def __init__(self, folder: Path, fingerprint: str, prompts: Sequence[str]) -> None:
        self._folder, self._prompts = folder / re.sub(r"\W", "-", fingerprint), prompts

    def nearest(self, number: int) -> int:
        """The last decoder layer, not after `number`, before which all prompts are known; -1 if there is none."""
        known = [self._known(prompt) for prompt in self._prompts]
        return max((layer for layer in set.intersection(*known) if layer <= number), default=-1)

    def has(self, prompt: int, number: int) -> bool:
        """Whether a prompt is known before a decoder layer. prompt: its index."""
        return self._path(prompt, number).exists()

    def read(self, prompt: int, number: int, device: torch.device) -> Tensor:
        """The hidden state of a prompt before a decoder layer, [1, L, H].

        Raises:
            ResourceError: The file cannot be read.
        """
        path = self._path(prompt, number)
        try:
            hidden: Tensor = load_file(path, device=str(device))["hidden"]
        except (OSError, SafetensorError) as error:
            raise ResourceError(f"hidden states {path} cannot be read ({error}): delete the file and go on") from error
        return hidden

    def write(self, prompt: int, number: int, hidden: Tensor) -> None:
        """Keep the hidden state of a prompt before a decoder layer.

        Raises:
            ResourceError: The file cannot be written.
        """
        path = self._path(prompt, number)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, save({"hidden": hidden.cpu().contiguous()}))
        except OSError as error:
            raise ResourceError(
                f"hidden states {path} cannot be written ({error.strerror}): make room, or leave --hidden-cache out"
            ) from error

    def _known(self, prompt: str) -> set[int]:
        try:
            names = os.listdir(self._folder / prompt)
        except FileNotFoundError:
            return set()
        return {int(name.partition(".")[0]) for name in names if name[0].isdigit()}

    def _path(self, prompt: int, number: int) -> Path:
        return self._folder / self._prompts[prompt] / f"{number}.safetensors"
