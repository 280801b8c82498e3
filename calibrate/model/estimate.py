"""Estimate a calibration's time and memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from calibrate.model.layers import ROWS, decoder_layers
from calibrate.model.weights import stays_resident
from calibrate.recipe import SAMPLED_ROWS, Recipe
from calibrate.timing import LONG
from s2o_runtime.config import REPRESENTATIVES
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.errors import ResourceError
from s2o_runtime.identity import Geometry
from s2o_runtime.layer_kinds import text_config

STEP = 1024  # tokens; suggested lengths are multiples of it
SAFE = 0.9  # of the length that memory in use would allow by its own
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@contextmanager
def within_memory(device: torch.device, length: int, resident: int, what: str) -> Iterator[None]:
    """Turn torch's error into one sentence if the GPU's memory runs out inside the block.

    Args:
        device: where the block runs.
        length: tokens of the prompt it works on.
        resident: bytes in use whatever the length, such as the weights.
        what: what the block does, in words.

    Raises:
        ResourceError: The memory ran out.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        total = int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0
        needed = torch.cuda.max_memory_allocated(device) + requested_bytes(str(error))
        fits = longest_that_fits(length, needed, resident, total)
        raise ResourceError(
            f"{total / (1 << 30):.1f} GiB of GPU memory ran out while {what} at {length} tokens, one layer and one "
            f"prompt at a time: about {fits} tokens fit, use shorter --lengths or fewer --num-prompts; "
            "what was measured is kept"
        ) from error


def free_memory(device: torch.device) -> int:
    """Bytes that tensors could still take on a GPU, those included that torch holds without using them; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def plenty_is_free(device: torch.device) -> bool:
    """Whether half of a GPU's memory is free, so that some may be taken for what is only quicker; False on a CPU."""
    if device.type != "cuda":
        return False
    return free_memory(device) >= torch.cuda.get_device_properties(device).total_memory / 2


def longest_that_fits(length: int, needed: int, resident: int, total: int) -> int:
    """A length in tokens that fits, if all memory but what is resident grows with the length.

    Args:
        length: the length at which memory ran out.
        needed: bytes that this length would have needed.
        resident: bytes in use whatever the length.
        total: bytes of the GPU's memory.
    """
    share = max(0, total - resident) / max(1, needed - resident)
    return max(STEP, int(SAFE * min(1.0, share) * length) // STEP * STEP)


def requested_bytes(message: str) -> int:
    """The bytes that torch's error message says it could not allocate; 0 if it does not say."""
    match = re.search(r"Tried to allocate ([\d.]+) (KiB|MiB|GiB)", message)
    return int(float(match[1]) * UNITS[match[2]]) if match else 0


class Rates(NamedTuple):
    """What a device does in a second, and what takes time whatever the sizes.

    products, attention: FLOP/s of a layer's matrix products and of dense attention. curves: pairs of a query and a key
    whose part in all curves of a ranking is measured in a second, of one head whose dim is 128 or less. logits: numbers
    of the vocabulary's width that are compared in a second. token: seconds for a token in a layer, of norms, errors
    and copies. trial, timing: seconds for a trial of the search and for a layer that is timed, besides the attention in
    them. compiling: seconds for the kernels of a stage. start: seconds to load and test a small model. read, draw:
    Bytes of weights in a second, of a file's and of random ones.
    """

    products: float
    attention: float
    curves: float
    logits: float
    token: float
    trial: float
    timing: float
    compiling: float
    start: float
    read: float
    draw: float


H200 = Rates(
    products=6e14,
    attention=6e14,
    curves=3.25e11,
    logits=1e11,
    token=8e-7,
    trial=0.045,
    timing=0.04,
    compiling=15.0,
    start=20.0,
    read=1.5e9,
    draw=5e9,
)
CPU_THREAD = Rates(
    products=8e10,
    attention=2.2e10,
    curves=5e7,
    logits=3e8,
    token=2e-6,
    trial=0.05,
    timing=0.0,
    compiling=0.0,
    start=10.0,
    read=1e9,
    draw=2e8,
)
H200_SMS = 132
FLOPS_OF_SM = {  # of dense 16-bit products, in a cycle
    (8, 0): 2048,
    (8, 6): 1024,
    (8, 9): 1024,
    (9, 0): 4096,
    (10, 0): 8192,
    (10, 3): 8192,
    (12, 0): 1024,
}
TIMED = 12  # times dense attention that a trial runs: S2O and dense attention in turns, and before that to compile
TIMED_ALONE = 4  # the same where dense attention takes so long that it is not timed with each trial
TIMED_LAYERS = 15  # the same for a layer of the profile
CROSSOVERS = 50  # times dense attention at `CROSSOVER_LENGTH` that all crossovers of a model take
CROSSOVER_LENGTH = 131072
GROUPS = 2.4  # groups of like layers at a length, over the square root of how many layers there are
TRIED = 0.7  # of the trials that a recipe allows: fewer points than that are promising at long lengths
PROOFS = 1.8  # how often a layer is proven, with those that are revised, which need dense attention once
ATTEMPTS = 1.2  # how often a layer is certified, with those whose bound is over its limit at first
NOISE = 2  # prompts of each length whose rounding is measured
SCRATCH = 3  # rows of an MLP that are in memory at a time: its two factors and their product
GIB = 1 << 30


@dataclass(frozen=True)
class ModelSizes:
    """What of a model decides how long it runs.

    parameters: all of them. of_token: those of decoder layers that a token meets, where experts are chosen fewer than
    all. largest_layer: those of the largest decoder layer. hidden, intermediate, vocabulary: widths. resident: whether
    the weights stay on the device.
    """

    parameters: int
    of_token: int
    largest_layer: int
    hidden: int
    intermediate: int
    vocabulary: int
    resident: bool

    @classmethod
    def of(cls, model: Any, device: str, memory: int = 0) -> ModelSizes:
        """The sizes of a transformers model, or of its skeleton, and whether it is going to stay on a torch device, or
        on a GPU elsewhere with so many bytes of memory."""
        config = text_config(model.config)
        layers = decoder_layers(model)
        experts = max((int(getattr(config, name, 0) or 0) for name in ("num_experts", "num_local_experts")), default=0)
        chosen = int(getattr(config, "num_experts_per_tok", 0) or 0) / experts if experts else 1.0
        layer_parameters = [dict(layer.module.named_parameters()) for layer in layers]
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return cls(
            parameters=parameters,
            of_token=sum(
                round(parameter.numel() * (chosen if ".experts." in name else 1.0))
                for parameters in layer_parameters
                for name, parameter in parameters.items()
            ),
            largest_layer=max(
                sum(parameter.numel() for parameter in parameters.values()) for parameters in layer_parameters
            ),
            hidden=int(config.hidden_size),
            intermediate=int(getattr(config, "intermediate_size", 0) or 4 * config.hidden_size),
            vocabulary=int(config.vocab_size),
            resident=stays_resident(parameters * number_width(device), torch.device(device), memory),
        )


@dataclass(frozen=True)
class Estimate:
    """What a calibration will take.

    seconds: by the phases' names, in their order. memory: bytes on the device at most.
    """

    seconds: Mapping[str, float]
    memory: float

    @property
    def total(self) -> float:
        """Seconds of the whole run."""
        return sum(self.seconds.values())


def estimate(recipe: Recipe, sizes: ModelSizes, geometry: Geometry, device: DeviceIdentity) -> Estimate:
    """What a calibration will take, within a factor of about 1.5 on a GPU like those that were measured.

    Layers without full attention count by the products of their weights alone. What the journal has already is not left
    out. Several GPUs share all of the work.

    Args:
        recipe: what is calibrated, on what.
        sizes, geometry: of the model.
        device: what it runs on.
    """
    rates = rates_of(device)
    on_gpu = device.kind == "cuda"
    proven = sorted({*recipe.lengths, *recipe.checked_lengths})
    steps = _Steps(sizes, geometry, rates)
    layers = geometry.layers
    weights = sizes.parameters * number_width(recipe.device) / (rates.draw if recipe.random_weights else rates.read)
    read = 0.0 if sizes.resident else weights

    measuring = read + rates.compiling
    searching = rates.compiling
    trials = TRIED * recipe.trials * min(layers, GROUPS * math.sqrt(layers))
    for length in recipe.lengths:
        pairs = length * (length + 1) / 2 / max(1, length // SAMPLED_ROWS if on_gpu else 1)
        measuring += recipe.num_prompts * steps.curves(pairs, _rankings(recipe, length))
        measuring += recipe.num_prompts * steps.forward(length)
        timed = TIMED if steps.attention(length) < LONG else TIMED_ALONE
        searching += trials * (rates.trial + on_gpu * timed * steps.attention(length))
    searching += on_gpu * CROSSOVERS * steps.attention(CROSSOVER_LENGTH)
    timing = sum(layers * (rates.timing + on_gpu * TIMED_LAYERS * steps.attention(length)) for length in proven)
    proving = read + timing + PROOFS * recipe.held_out * sum(map(steps.both, proven))
    certifying = read + ATTEMPTS * recipe.num_certify * sum(map(steps.both, proven)) * (3 if recipe.per_prompt else 1)
    certifying += on_gpu * sum(min(NOISE, recipe.num_certify) * 2 * steps.forward(length) for length in proven)
    shared = recipe.gpus if recipe.gpus and on_gpu else 1  # workers on a CPU share its threads
    seconds = {
        "loading the model": rates.start + weights - read,
        "measuring": measuring / shared,
        "searching": searching / shared,
        "proving": proving / shared,
        "certifying": certifying / shared if recipe.num_certify else 0.0,
    }
    return Estimate({name: value for name, value in seconds.items() if value}, _memory(recipe, sizes, geometry))


class _Steps:
    """The seconds of a prompt's way through a model."""

    def __init__(self, sizes: ModelSizes, geometry: Geometry, rates: Rates) -> None:
        self._sizes, self._geometry, self._rates = sizes, geometry, rates

    def attention(self, length: int) -> float:
        """The seconds that dense attention takes in one layer."""
        width = self._geometry.query_heads * self._geometry.head_dim
        return 4 * width * length * length / 2 / self._rates.attention

    def forward(self, length: int) -> float:
        """The seconds that all layers of the dense model take."""
        products = 2 * self._sizes.of_token * length / self._rates.products
        return products + self._geometry.layers * self.attention(length)

    def curves(self, pairs: float, rankings: int) -> float:
        """The seconds that measuring the curves of all layers of full attention takes."""
        wide = max(1.0, self._geometry.head_dim / 128)
        return self._geometry.layers * self._geometry.query_heads * pairs * rankings * wide / self._rates.curves

    def both(self, length: int) -> float:
        """The seconds that both models take together, with every layer's errors and both models' predictions."""
        errors = self._geometry.layers * (self.attention(length) + length * self._rates.token)
        return 2 * self.forward(length) + errors + self._predictions(length)

    def _predictions(self, length: int) -> float:
        products = 2 * 2 * self._sizes.hidden * self._sizes.vocabulary * length / self._rates.products
        return products + 2 * self._sizes.vocabulary * length / self._rates.logits


def rates_of(device: DeviceIdentity) -> Rates:
    """What a device does in a second: an H200's rates by the peak of a GPU, one thread's by a CPU's threads."""
    if device.kind != "cuda":
        return _faster(CPU_THREAD, torch.get_num_threads())
    sms = device.sm_count or H200_SMS  # unknown of workers elsewhere
    nearest = max((capability for capability in FLOPS_OF_SM if capability <= device.capability), default=(9, 0))
    return _faster(H200, sms * FLOPS_OF_SM[nearest] / (H200_SMS * FLOPS_OF_SM[9, 0]))


def _faster(rates: Rates, times: float) -> Rates:
    """The rates of a device that computes so many times faster; what a host does is as fast as before."""
    return rates._replace(
        products=rates.products * times,
        attention=rates.attention * times,
        curves=rates.curves * times,
        logits=rates.logits * times,
        token=rates.token / times,
    )


def _rankings(recipe: Recipe, length: int) -> int:
    """How many rankings have curves at a length."""
    return len(recipe.segments_for(length)) * len(recipe.scores) * len(REPRESENTATIVES)


def _memory(recipe: Recipe, sizes: ModelSizes, geometry: Geometry) -> float:
    """Bytes on the device at most: weights, the prompts on their way, and the inside of one layer of one prompt."""
    width = number_width(recipe.device)
    longest = max((*recipe.lengths, *recipe.checked_lengths))
    weights = sizes.parameters if sizes.resident else max(sizes.largest_layer, sizes.vocabulary * sizes.hidden)
    on_their_way: Sequence[int] = (  # tokens; of each proven prompt the patched and the dense model's
        recipe.num_prompts * sum(recipe.lengths),
        2 * max(recipe.held_out, recipe.num_certify) * longest,
    )
    heads = geometry.query_heads * geometry.head_dim
    exact = longest * heads * (4 + 2 * width)
    return (
        width * (weights + max(on_their_way) * sizes.hidden + SCRATCH * min(longest, ROWS) * sizes.intermediate) + exact
    )


def number_width(device: str) -> int:
    """Bytes of a number in the type that models have on a device."""
    return 2 if device.startswith("cuda") else 4
