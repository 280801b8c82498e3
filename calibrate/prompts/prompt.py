"""A prompt, and the three sets of prompts that a calibration uses."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from calibrate.record import PromptHash, PromptHashes

Origins = Counter[tuple[str, str]]  # tokens of each domain and group


@dataclass(frozen=True)
class Prompt:
    """Token ids, int64 [L], and the spans of the answers among them, as (first token, one behind the last).

    domain: the kind of text, such as "code". group: the source of most of it, such as a novel or a module, empty if
    that is not known; prompts of one group are not independent of one another.
    """

    ids: Tensor
    answers: tuple[tuple[int, int], ...] = ()
    domain: str = "code"
    group: str = ""

    @classmethod
    def from_ids(cls, ids: Sequence[int], answers: tuple[tuple[int, int], ...], origins: Origins) -> Prompt:
        """Return the prompt of token ids, of the domain and group that most of them are from."""
        return cls(torch.frombuffer(array("q", ids), dtype=torch.int64), answers, *origins.most_common(1)[0][0])

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def sha256(self) -> str:
        """The hash that names the prompt in a profile."""
        return hashlib.sha256(self.ids.to(torch.int64).numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a run, by length in tokens. No two of the three sets share a document, at any length.

    calibration: a length that is only checked has none. held_out: layers are adjusted on these. certify: the finished
    profile is certified on these; they choose nothing, and a length may have none.
    """

    calibration: dict[int, list[Prompt]]
    held_out: dict[int, list[Prompt]]
    certify: dict[int, list[Prompt]] = field(default_factory=dict)

    @property
    def by_purpose(self) -> tuple[dict[int, list[Prompt]], ...]:
        """The three sets, in this order."""
        return self.calibration, self.held_out, self.certify

    def record(self) -> PromptHashes:
        """Return the hashes, for the profile."""
        calibration, held_out, certify = (
            tuple(PromptHash(length=length, sha256=prompt.sha256) for length in prompts for prompt in prompts[length])
            for prompts in self.by_purpose
        )
        return PromptHashes(calibration=calibration, held_out=held_out, certify=certify)
