#!/usr/bin/env python3
"""Train the demo model: a small Llama whose long-range attention is learned, not random.

    python -m scripts.demo_model.corpus data/demo
    python -m scripts.demo_model.train --data data/demo --out calibrate/demo/model

takes about 15 minutes on one H200. The long phases are there to teach retrieval at a distance.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from calibrate.prompts.retrieval import DIGITS, TOKENS_PER_NEEDLE, make_needles
from scripts.demo_model.corpus import END_OF_TEXT

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
ANSWER_WEIGHT = 4.0  # a code's digits are 0.5% of the tokens; they must not drown
EVAL_CONTEXTS = 8
EVAL_NEEDLES = 8


@dataclass(frozen=True)
class Phase:
    """Windows of `length` tokens, `batch` at a time, from the share `start` of the training time on."""

    start: float
    length: int
    batch: int


PHASES = (Phase(0.0, 8192, 16), Phase(0.55, 32768, 4), Phase(0.92, 131072, 1))
LENGTHS = (8192, 32768, 131072)  # of the exams


def model_config(vocab_size: int) -> LlamaConfig:
    """At most 8.0 M parameters (16 MB in bf16); head dim 128 and four query heads per KV head."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


class Windows:
    """Random windows of the corpus with needles written over them."""

    def __init__(self, data: Path, split: str, tokenizer: Tokenizer, seed: int) -> None:
        self.tokens = np.frombuffer(lzma.decompress((data / f"{split}.bin.xz").read_bytes()), dtype=np.uint16)
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)

    def _window(self, length: int) -> np.ndarray:
        start = self.rng.randrange(len(self.tokens) - length)
        return self.tokens[start : start + length].astype(np.int64)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def batch(self, size: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Input ids, next tokens and loss weights, each [size, length]."""
        ids = np.stack([self._window(length + 1) for _ in range(size)])
        weights = np.ones((size, length), dtype=np.float32)
        for row in range(size):
            for needle in make_needles(max(1, length // TOKENS_PER_NEEDLE), self.rng):
                fact, question, answer = map(self._encode, (needle.fact, needle.question, needle.answer))
                distance = self._distance(length)
                position = self.rng.randrange(max(1, length - distance - 64))
                ask = position + distance
                end = ask + len(question) + len(answer)
                if end > length:
                    continue
                ids[row, position : position + len(fact)] = fact
                ids[row, ask:end] = question + answer
                digits = ask + len(question) - 1  # the position that predicts the first digit
                weights[row, digits : digits + DIGITS] = ANSWER_WEIGHT
        batch = torch.from_numpy(ids)
        return batch[:, :-1], batch[:, 1:], torch.from_numpy(weights)

    def _distance(self, length: int) -> int:
        """Half log-uniform (every scale), half uniform (mostly far)."""
        if self.rng.random() < 0.5:
            return int(math.exp(self.rng.uniform(math.log(64), math.log(length - 128))))
        return self.rng.randrange(64, length - 128)

    def exam(self, length: int) -> tuple[Tensor, list[int]]:
        """A window [1, length] with questions at its end, and the position of each code's first digit."""
        ids = self._window(length)
        needles = make_needles(EVAL_NEEDLES, self.rng)
        spacing = (length - 64 * EVAL_NEEDLES - 64) // EVAL_NEEDLES
        starts = []
        for number, needle in enumerate(needles):
            fact, question, answer = map(self._encode, (needle.fact, needle.question, needle.answer))
            position = number * spacing + self.rng.randrange(spacing - len(fact))
            ids[position : position + len(fact)] = fact
        for number, needle in enumerate(self.rng.sample(needles, len(needles))):
            question, answer = self._encode(needle.question), self._encode(needle.answer)
            ask = length - 64 * (EVAL_NEEDLES - number)
            ids[ask : ask + len(question) + len(answer)] = question + answer
            starts.append(ask + len(question))
        return torch.from_numpy(ids)[None], starts


def weighted_loss(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean of the next-token losses. hidden: [B, L, H]; head: [V, H]; targets, weights: [B, L]."""
    logits = F.linear(hidden, head).float()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def needle_accuracy(model: LlamaForCausalLM, windows: Windows, length: int) -> float:
    """Share of needles whose five digits are all predicted, teacher-forced, at the end of `length` tokens."""
    correct = total = 0
    for _ in range(EVAL_CONTEXTS):
        ids, starts = windows.exam(length)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            hidden = model.model(ids.cuda(), use_cache=False).last_hidden_state
            tail = min(length, 64 * EVAL_NEEDLES + 64)
            predicted = F.linear(hidden[0, -tail:], model.lm_head.weight).argmax(-1).cpu()
        for start in starts:
            row = start - 1 - (length - tail)
            correct += bool((predicted[row : row + DIGITS] == ids[0, start : start + DIGITS]).all())
            total += 1
    return correct / total


def held_out_loss(model: LlamaForCausalLM, windows: Windows, length: int) -> float:
    """Mean next-token loss in nats on plain held-out text, without needles."""
    losses = []
    for _ in range(EVAL_CONTEXTS):
        ids = torch.from_numpy(windows._window(length + 1))[None].cuda()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state
            losses.append(F.cross_entropy(F.linear(hidden[0], model.lm_head.weight).float(), ids[0, 1:]).item())
    return sum(losses) / len(losses)


class Trainer:
    """The model, its two optimisers and the seconds that they were used."""

    def __init__(self, config: LlamaConfig) -> None:
        torch.manual_seed(0)
        self.model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32).cuda()
        matrices, others = [], []
        for name, weight in self.model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                torch.nn.init.normal_(weight, std=0.5 * weight.shape[1] ** -0.5)
                matrices.append(weight)
            else:
                others.append(weight)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                torch.nn.init.zeros_(weight)
        self.optimizers = [
            torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.1),
            torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.base_rates = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]
        self.used = 0.0
        self.step = 0

    def set_rate(self, done: float) -> None:
        factor = min(1.0, (self.step + 1) / 100) * (1.0 if done < 0.4 else max(0.03, (1.0 - done) / 0.6))
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group, rate in zip(groups, self.base_rates, strict=True):
            group["lr"] = rate * factor


def train(trainer: Trainer, windows: Windows, seconds: float) -> None:
    """Train until `seconds` are used."""
    model, loss_of = trainer.model, torch.compile(weighted_loss, dynamic=False)
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    length = warm = 0
    clock = time.monotonic()
    while trainer.used < seconds:
        done = trainer.used / seconds
        phase = [p for p in PHASES if done >= p.start][-1]
        if phase.length != length:
            length, warm = phase.length, 2
            print(f"step {trainer.step}: windows of {length} tokens from {trainer.used:.0f} s on", flush=True)
        trainer.set_rate(done)
        ids, targets, weights = (t.to("cuda", non_blocking=True) for t in windows.batch(phase.batch, length))
        with torch.autocast("cuda", torch.bfloat16):
            hidden = model.model(ids, use_cache=False).last_hidden_state
            loss = loss_of(hidden, model.lm_head.weight, targets, weights)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in trainer.optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        trainer.step += 1
        if trainer.step % 50 == 0:
            print(f"step {trainer.step}: {trainer.used:.0f} s, loss {loss.item():.3f}", flush=True)
        if warm or trainer.step % 8 == 0:
            torch.cuda.synchronize()
        if warm:  # compilation is not training time
            warm -= 1
        else:
            trainer.used += time.monotonic() - clock
        clock = time.monotonic()


def export(trainer: Trainer, data: Path, out: Path, windows: Windows) -> None:
    """Write weights (bf16), tokenizer and MODEL.json with what the finished model can do."""
    model = trainer.model.eval()
    results = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_seconds": round(trainer.used),
        "steps": trainer.step,
        "held_out_loss": {str(n): round(held_out_loss(model, windows, n), 4) for n in LENGTHS},
        "needle_accuracy": {str(n): round(needle_accuracy(model, windows, n), 4) for n in LENGTHS},
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "sources": json.loads((data / "corpus.json").read_text()),
    }
    print({key: value for key, value in results.items() if key != "sources"}, flush=True)
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(out)
    PreTrainedTokenizerFast(
        tokenizer_file=str(data / "tokenizer.json"),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=model.config.max_position_embeddings,
    ).save_pretrained(out)
    (out / "MODEL.json").write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/demo"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=840.0, help="training time")
    args = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    trainer = Trainer(model_config(tokenizer.get_vocab_size()))
    print(f"{sum(p.numel() for p in trainer.model.parameters()) / 1e6:.2f} M parameters")
    windows = Windows(args.data, "train", tokenizer, seed=0)
    with sdpa_kernel(BACKENDS, set_priority=True):
        train(trainer, windows, args.seconds)
        export(trainer, args.data, args.out, Windows(args.data, "hold", tokenizer, seed=1))


if __name__ == "__main__":
    main()
