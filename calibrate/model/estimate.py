"""Estimate a calibration's time and memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from calibrate.model.layers import ROWS, list_decoder_layers
from calibrate.model.weights import decide_resident
from calibrate.recipe import SAMPLED_ROWS, WINDOW_ROWS, WINDOWS, Recipe
from s2o_runtime.config import REPRESENTATIVES
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.errors import ResourceError
from s2o_runtime.identity import Geometry
from s2o_runtime.layer_kinds import get_text_config

GIB = 1 << 30
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB}
STEP = 1024  # tokens; suggested lengths are multiples of it
SAFE = 0.9  # of the length that memory in use would allow by its own


@contextmanager
def wrap_out_of_memory(device: torch.device, length: int, resident: int, what: str) -> Iterator[None]:
    """Raise ResourceError if the GPU's memory runs out inside the block.

    length: tokens of the prompt it works on. resident: bytes in use whatever the length, such as the weights. what: the
    block's work, in words.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        total = int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0
        match = re.search(r"Tried to allocate ([\d.]+) (KiB|MiB|GiB)", str(error))
        requested = int(float(match[1]) * UNITS[match[2]]) if match else 0
        fits = find_longest_length(length, torch.cuda.max_memory_allocated(device) + requested, resident, total)
        raise ResourceError(
            f"{total / GIB:.1f} GiB of GPU memory ran out while {what} at {length} tokens, one layer and one "
            f"prompt at a time: about {fits} tokens fit, use shorter --lengths or fewer --num-prompts; "
            "what was measured is kept"
        ) from error


def measure_free_memory(device: torch.device) -> int:
    """Return the bytes that tensors could still take on a GPU, those of torch's cache included; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def has_plenty_of_memory(device: torch.device) -> bool:
    """Return whether half of a GPU's memory is free, enough for what is only quicker; False on a CPU."""
    if device.type != "cuda":
        return False
    total = torch.cuda.get_device_properties(device).total_memory
    return measure_free_memory(device) >= total / 2


def find_longest_length(length: int, needed: int, resident: int, total: int) -> int:
    """Return a length in tokens that fits, if all memory but what is resident grows with the length.

    length: where memory ran out. needed: bytes that it would have needed, resident: those in use whatever the length,
    and total: those of the GPU's memory.
    """
    share = max(0, total - resident) / max(1, needed - resident)
    return max(STEP, int(SAFE * min(1.0, share) * length) // STEP * STEP)


class Rates(NamedTuple):
    """Work that a device does in a second.

    flops: of matrix products and dense attention. curves: pairs of a query and a key in all curves of a ranking, of one
    head whose dim is 128 or less. tokens: tokens in a layer, with their norms, errors and copies.
    """

    flops: float
    curves: float
    tokens: float


H200 = Rates(flops=6e14, curves=3.25e11, tokens=8e5)
CPU_THREAD = Rates(flops=8e10, curves=5e7, tokens=4e5)
H200_SMS = 132
FLOPS_OF_SM = {  # of dense 16-bit products, in a cycle, by compute capability
    (8, 0): 2048,  # A100
    (8, 6): 1024,  # RTX 30
    (8, 9): 1024,  # L4, RTX 40
    (9, 0): 4096,  # H100, H200
    (10, 0): 8192,  # B200, and B300 (10, 3)
    (12, 0): 1024,  # RTX 50
}
PROMPT_TOKENS = 4e5  # of prompts that are made in a second
START = 4.0  # seconds to load a small model, and to test it
READ, DRAWN = 1.5e9, 5e9  # bytes of a file's weights that are read in a second, and of random ones
COMPILING, CROSSOVERS = 12.0, 7.0  # seconds for the kernels of a stage, and for crossovers, on a GPU
TRIAL = 0.02  # seconds for a trial of the search, besides the attention in it
TIMED = 8  # calls of a trial, to compile among them
TIMED_LAYER, TIMED_LAYERS = 0.03, 4  # seconds for a layer of the profile besides its calls, and those of each kind
GROUPS = 2.4  # groups of like layers at a length, over the square root of how many layers there are
TRIED = 0.4  # of the trials that a recipe allows: fewer points are promising
PROOFS = 1.8, 1.1  # how often a layer is proven, with those that are revised: to spend a budget of errors, of answers
SPARSE, SHORT, FALL = 0.66, 8192, 0.45  # S2O's time over dense attention's at so many tokens, and how it falls on
ATTEMPTS = 1.25  # how often a layer is certified, with those whose bound is over its limit at first
LOOKS = 1.2  # how often answers are certified, with the looks at less
TURNS, REVISED = 2, 6  # times that all questions run behind a prompt's cache: of a variant, and of the dense model
QUESTIONS, QUESTION, ROOM = 16, 70, 112  # the most; tokens of one with its answer, and of the part that has one
TURN = 0.002  # seconds of a layer for all questions on a GPU, besides their products: calls, and copies of the cache
ANSWERED = 5  # prompts of a length that a scale is measured on, and questions are asked about in s2o-profile verify
WEIGHED, WEIGHED_FORWARDS = 4, 5  # prompts that sensitivities are measured on, and forward passes that one takes
SCRATCH = 3  # rows of an MLP that are in memory at a time: its two factors and their product


@dataclass(frozen=True)
class ModelSizes:
    """The sizes that decide how long a model runs.

    parameters: all of them. of_token: those that a token meets in layers and head, where experts are chosen fewer than
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
    def from_model(cls, model: Any, device: str, memory: int = 0) -> ModelSizes:
        """Read the sizes of a model or its skeleton, for a torch device; a GPU elsewhere has `memory` bytes."""
        config = get_text_config(model.config)
        experts = max(getattr(config, name, None) or 0 for name in ("num_experts", "num_local_experts"))
        chosen = (getattr(config, "num_experts_per_tok", None) or 0) / experts if experts else 1.0
        layers = [
            [(name, parameter.numel()) for name, parameter in layer.module.named_parameters()]
            for layer in list_decoder_layers(model)
        ]
        parameters = sum(parameter.numel() for parameter in model.parameters())
        of_token = config.vocab_size * config.hidden_size
        for name, count in chain.from_iterable(layers):
            of_token += round(count * (chosen if ".experts." in name else 1))
        return cls(
            parameters=parameters,
            of_token=of_token,
            largest_layer=max(sum(count for _, count in layer) for layer in layers),
            hidden=config.hidden_size,
            intermediate=int(getattr(config, "intermediate_size", 0) or 4 * config.hidden_size),
            vocabulary=config.vocab_size,
            resident=decide_resident(parameters * number_width(device), torch.device(device), memory),
        )


@dataclass(frozen=True)
class Estimate:
    """The time and memory of a calibration: seconds by the phases' names in their order, and bytes on the device.

    verifying: seconds of the phases of `s2o-profile verify`: its own prompts' proof, or its certificate's on others.
    """

    seconds: Mapping[str, float]
    memory: float
    verifying: Mapping[str, float]

    @property
    def total(self) -> float:
        """Seconds of the whole run."""
        return sum(self.seconds.values())


def estimate(recipe: Recipe, sizes: ModelSizes, geometry: Geometry, device: DeviceIdentity) -> Estimate:
    """Estimate a calibration, within a factor of about 1.5 on a GPU like those that were measured.

    Layers without full attention count by their weights alone, and what the journal has already counts too.
    """
    rates, on_gpu, layers = scale_rates(device), device.kind == "cuda", geometry.layers

    def time_attention(length: int) -> float:  # dense, in one layer
        return 2 * geometry.query_heads * geometry.head_dim * length * length / rates.flops

    def time_forward(length: int) -> float:  # the dense model
        return 2 * sizes.of_token * length / rates.flops + layers * time_attention(length)

    def time_sparse(length: int) -> float:  # S2O's attention, in one layer
        return time_attention(length) * (min(1.0, SPARSE * (SHORT / length) ** FALL) if on_gpu else 1.0)

    def time_patched(length: int) -> float:
        return time_forward(length) - layers * (time_attention(length) - time_sparse(length))

    def time_errors(length: int) -> float:  # the patched model with every layer's errors on one prompt
        rows = min(length, WINDOWS * WINDOW_ROWS)
        return time_patched(length) + layers * (time_attention(length) * rows / length + rows / rates.tokens)

    weights = sizes.parameters * number_width(recipe.device) / (DRAWN if recipe.random_weights else READ)
    read = 0.0 if sizes.resident else weights

    def time_answers(length: int, prompts: int, dense: float, variants: float) -> float:
        share = QUESTION * max(1, min(QUESTIONS, length // ROOM)) / length
        # each of their rows sees all of the prompt, where one of the prompt's sees half of it
        turn = layers * on_gpu * TURN + share * (time_forward(length) + layers * time_attention(length))
        answering = dense * (time_forward(length) + REVISED * turn)
        return read + prompts * (answering + variants * (time_patched(length) + TURNS * turn))

    measuring = read + on_gpu * COMPILING
    searching = on_gpu * CROSSOVERS
    trials = TRIED * recipe.trials * GROUPS * math.sqrt(layers)
    head_layers = layers * geometry.query_heads * max(1.0, geometry.head_dim / 128)
    for length in recipe.lengths:
        every = max(1, length // SAMPLED_ROWS) if on_gpu else 1
        pairs = length * length / 2 / every
        rankings = len(recipe.select_segments(length)) * len(recipe.lookbacks) * len(REPRESENTATIVES)
        measuring += recipe.num_prompts * head_layers * pairs * rankings / rates.curves
        measuring += recipe.num_prompts * time_forward(length)
        searching += (trials + layers) * (TRIAL + on_gpu * TIMED * time_sparse(length))
        searching += on_gpu * TIMED_LAYERS * time_attention(length)
    proven = recipe.all_lengths

    def time_profile(length: int) -> float:  # attention in all layers, the rest in one of them
        once = time_forward(length) / layers + time_attention(length)
        attention = layers * (time_sparse(length) + time_attention(length))
        return layers * TIMED_LAYER + time_patched(length) + TIMED_LAYERS * (attention + once)

    of_answers = recipe.budget.kind == "kl"
    answered = recipe.lengths if of_answers and sizes.resident else ()  # the dense model has read these prompts

    def time_proof(often: float, prompts: int = recipe.held_out, dense: bool = True) -> float:
        forwards = sum(time_forward(at) for at in proven if dense and at not in answered)  # each prompt is read once
        return read + prompts * (forwards + often * sum(map(time_errors, proven)))

    timing = on_gpu * sum(map(time_profile, proven))
    noise = weighing = scaling = 0.0
    if of_answers:

        def certify(often: float) -> float:
            return sum(time_answers(length, recipe.num_certify, 1, often) for length in proven)

        certifying = certify(LOOKS)
        compared = recipe.noise_lengths if on_gpu else []
        noise = sum(time_answers(length, ANSWERED, 1, 1) for length in compared)
        weighing = 2 * read + on_gpu * COMPILING / 2 + WEIGHED * WEIGHED_FORWARDS * time_forward(min(recipe.lengths))
        weighing += sum(time_answers(length, ANSWERED, length not in compared, 2) for length in recipe.lengths)
        scaling = sum(time_answers(length, recipe.held_out, 0.5, 1) for length in recipe.lengths)
    else:
        # random weights find no needle
        certify = partial(time_proof, prompts=recipe.num_certify, dense=not recipe.random_weights)
        certifying = certify(ATTEMPTS)
    shared = recipe.gpus if recipe.gpus and on_gpu else 1  # workers on a CPU share its threads
    tokens = recipe.num_prompts * sum(recipe.lengths) + (recipe.held_out + recipe.num_certify) * sum(proven)
    seconds = {
        "making prompts": tokens / PROMPT_TOKENS,
        "loading the model": START + weights - read,
        "testing the model's attention": START,
        "measuring noise": noise / shared,
        "measuring": measuring / shared,
        "weighing layers by answers": weighing / shared,
        "searching": searching / shared,
        "measuring answers": scaling / shared,
    }
    proof = {"proving": (timing + time_proof(PROOFS[of_answers])) / shared}
    certificate = {"certifying": certifying / shared if recipe.num_certify else 0.0}
    seconds |= certificate | proof if of_answers else proof | certificate  # in the order of the run
    answers = sum(time_answers(length, min(ANSWERED, recipe.held_out) + on_gpu, 1, 1) for length in proven)
    verifying = seconds | {"proving": time_proof(1) + answers, "certifying": certify(1)}
    memory = _estimate_memory(recipe, sizes, geometry)
    return Estimate({name: value for name, value in seconds.items() if value}, memory, verifying)


def scale_rates(device: DeviceIdentity) -> Rates:
    """Scale an H200's rates by the peak of a GPU, one thread's by a CPU's threads."""
    if device.kind != "cuda":
        return Rates(*(rate * torch.get_num_threads() for rate in CPU_THREAD))
    sms = device.sm_count or H200_SMS  # unknown of workers elsewhere
    nearest = max((capability for capability in FLOPS_OF_SM if capability <= device.capability), default=(9, 0))
    peak = sms * FLOPS_OF_SM[nearest] / (H200_SMS * FLOPS_OF_SM[9, 0])
    return Rates(*(rate * peak for rate in H200))


def _estimate_memory(recipe: Recipe, sizes: ModelSizes, geometry: Geometry) -> float:
    """Estimate the bytes on the device: weights, the prompts on their way, the inside of one layer of one prompt."""
    width = number_width(recipe.device)
    longest = max(recipe.all_lengths)
    weights = sizes.parameters if sizes.resident else max(sizes.largest_layer, sizes.vocabulary * sizes.hidden)
    tokens = max(  # on their way; of each proven prompt the patched and the dense model's
        recipe.num_prompts * sum(recipe.lengths), 2 * max(recipe.held_out, recipe.num_certify) * longest
    )
    exact = longest * geometry.query_heads * geometry.head_dim * (4 + 2 * width)
    return width * (weights + tokens * sizes.hidden + SCRATCH * min(longest, ROWS) * sizes.intermediate) + exact


def number_width(device: str) -> int:
    """Return the bytes of a number in the type that models have on a device."""
    return 2 if device.startswith("cuda") else 4
