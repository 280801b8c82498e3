"""Inputs of streamed proofs of a small model: random prompts, and layers with one configuration each."""

from dataclasses import dataclass

import torch

from calibrate.prompts.prompt import Prompt
from calibrate.proof.verify import Prover
from calibrate.work.executor import open_executor
from s2o_runtime.config import LayerConfig, TileConfig

TILE = TileConfig(64, 32, 1, 4, 1)


def uniform(tau, heads=4):
    """A layer with one threshold; the models of `support.models` have four heads."""
    return LayerConfig.uniform(heads, tau=tau, segment=64, tile=TILE, lookback=64)


@dataclass(frozen=True)
class Layers:
    """The configuration of each layer, the same at every length."""

    configs: tuple[LayerConfig, ...]
    kv_cache_dtype: str = "auto"

    def layer_config(self, layer, length):
        return self.configs[layer]


def prove(model, prompts, layers, revise=None, *, on_step=lambda: None):
    """The layers as revised, and their proofs by length; model: loaded, or an executor."""
    with open_executor(model) as executor:
        return Prover(executor, on_step=on_step).prove(layers, prompts, revise)


def random_prompts(*lengths, count=2):
    """Length -> prompts of random tokens, the same each time."""
    generator = torch.Generator().manual_seed(5)
    ids = {length: torch.randint(3, 128, (count, length), generator=generator) for length in lengths}
    return {length: [Prompt(each) for each in rows] for length, rows in ids.items()}
