"""Why the sparse model learns a repeated batch of random bytes sooner than its dense twin: a leak, or the start?

    python benchmarks/repeated_bytes.py
    python benchmarks/repeated_bytes.py --steps 4 --fresh-steps 6 --tokens 64

Each model trains on one batch again and again. Then the bytes behind a position are replaced: a logit at or before it
that changes is a leak. On fresh bytes each step no model without a leak gets below the entropy, ln 257 nats. The cosine
is that of the untrained model's hidden states at two positions of a row, the mean over all pairs.
"""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from lib.results import ResultFile, cpu_name
from trifocal.models import DecoderLM, ModelConfig
from trifocal.ops import Geometry
from trifocal.train.optimizer import make_optimizer
from trifocal.train.run_config import OptimizerSection

# The production model's proportions at an eighth of its length: half of the blocks are selected.
CONFIG = ModelConfig(
    vocab_size=257,
    dim=192,
    num_layers=4,
    num_heads=6,
    num_kv_heads=1,
    head_dim=32,
    value_dim=32,
    mlp_dim=512,
    geometry=Geometry(
        compression_block_size=4,
        compression_stride=2,
        selection_block_size=8,
        num_selected_blocks=16,
        num_initial_blocks=1,
        num_local_blocks=2,
        window_size=64,
    ),
)
# Attention, and the factor on the values of the untrained model.
VARIANTS: dict[str, tuple[str, float]] = {
    "sparse": ("nsa", 1.0),
    "window of 64": ("window", 1.0),
    "dense": ("dense", 1.0),
    "dense, values at a third": ("dense", 1 / 3),
    "dense, values times three": ("dense", 3.0),
}
ROWS = 4
SHOWN = (1, 5, 8, 10, 12)


def make(attention: str, factor: float) -> DecoderLM:
    """An untrained model; all have the same seed."""
    model = DecoderLM(replace(CONFIG, attention=attention))  # type: ignore[arg-type]
    model.init_weights(0)
    with torch.no_grad():
        for layer in model.attention_layers():
            layer.v_proj.weight.mul_(factor)
    return model


def draw(generator: torch.Generator, tokens: int) -> torch.Tensor:
    """A batch of random tokens, [ROWS, tokens + 1]."""
    return torch.randint(CONFIG.vocab_size, (ROWS, tokens + 1), generator=generator)


def train(model: DecoderLM, batches: list[torch.Tensor]) -> list[float]:
    """A step on each batch, as the trainer takes it; returns the losses."""
    optimizer = make_optimizer(model, OptimizerSection(learning_rate=6e-4))
    for group in optimizer.param_groups:
        group["lr"] = 6e-4
    losses = []
    for batch in batches:
        loss = model(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def likeness(model: DecoderLM, batch: torch.Tensor) -> float:
    """Mean cosine of the hidden states at two positions of a row."""
    states = torch.nn.functional.normalize(model.hidden_states(batch[:, :-1]), dim=-1)
    cosines = states @ states.transpose(1, 2)
    count = cosines.shape[1]
    return float((cosines.sum((1, 2)) - count).mean() / (count * (count - 1)))


@torch.no_grad()
def largest_leak(model: DecoderLM, batch: torch.Tensor) -> float:
    """The largest change of a logit when all bytes behind it are replaced."""
    tokens = batch[:, :-1]
    known, count = model(tokens), tokens.shape[1]
    worst = 0.0
    for last in sorted({0, count // 8 - 1, count // 8, count // 4, count // 2 - 1, count // 2, count - 2}):
        other = tokens.clone()
        other[:, last + 1 :] = (other[:, last + 1 :] + 91) % CONFIG.vocab_size
        worst = max(worst, float((model(other)[:, : last + 1] - known[:, : last + 1]).abs().max()))
    return worst


def main() -> int:
    """Measure all variants; the exit status is 1 if one leaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=SHOWN[-1])
    parser.add_argument("--fresh-steps", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.variants:
        batch = draw(torch.Generator().manual_seed(0), options.tokens)
        model = make(*VARIANTS[name])
        row: dict[str, Any] = {"attention": name, "cosine_at_start": likeness(model, batch)}
        losses = train(model, [batch] * options.steps)
        row |= {f"loss_at_step_{step}": losses[step - 1] for step in SHOWN if step <= options.steps}
        row["largest_change_by_the_future"] = largest_leak(model, batch)
        generator = torch.Generator().manual_seed(1)
        fresh = train(make(*VARIANTS[name]), [draw(generator, options.tokens) for _ in range(options.fresh_steps)])
        row["fresh_bytes_last_third"] = mean(fresh[-max(1, options.fresh_steps // 3) :])
        rows.append(row)
        print(row, flush=True)
    file = ResultFile(
        "repeated_bytes", "Learning repeated random bytes", folder=options.output, device=cpu_name(),
        commit=options.commit,
    )  # fmt: skip
    notes = [
        f"{ROWS} rows of {options.tokens} bytes, the same in each step; fresh bytes: {options.fresh_steps} steps, the "
        f"mean loss of the last third, where ln 257 is {math.log(257):.4f}.",
        "Four layers of width 192, 6/1 heads of 32, float32, AdamW at 6e-4.",
    ]
    print(file.write(rows, notes=notes).read_text())
    return int(any(row["largest_change_by_the_future"] > 0 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
