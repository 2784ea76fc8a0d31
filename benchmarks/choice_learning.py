"""Does the choice of blocks learn to find what a query asks for? Associative recall, small enough for a CPU.

    python benchmarks/choice_learning.py
    python benchmarks/choice_learning.py --variants sparse "sparse, dropout 0.2" --seeds 1 --steps 100

One layer, whose embedding adds that of the token before: what a first layer would have to learn is given, and what is
left is to find the pair of a key. Documents have one, a half and a quarter of the length and of the pairs.
`found` counts the queries whose block is chosen, as a share of those whose pair lies neither in the window nor in a
forced block; `chance` is the share that a random choice finds. Both are measured on documents that training never sees,
early in training and at its end.
"""

import argparse
import math
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lib.results import ResultFile, cpu_name
from trifocal.data.sources.synthetic import associations
from trifocal.models import DecoderLM, ModelConfig
from trifocal.models.choice_teaching import ChoiceTeaching, eligible_queries
from trifocal.ops import Geometry
from trifocal.testing.choices import Choices
from trifocal.testing.small_models import draw_keys_apart
from trifocal.train.config.sections import OptimizerSection
from trifocal.train.step.optimizer import make_optimizer

TOKENS, PAIRS, PARTS, ROWS, WARM_UP = 256, 16, (1, 2, 4), 64, 20
# A quarter of the blocks is selected, and the window is a sixteenth of the row, as in the part `recall` of quality.py.
GEOMETRY = Geometry(
    compression_block_size=8,
    compression_stride=4,
    selection_block_size=8,
    num_selected_blocks=8,
    num_initial_blocks=1,
    num_local_blocks=2,
    window_size=16,
)
CONFIG = ModelConfig(
    vocab_size=128,
    dim=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    value_dim=32,
    mlp_dim=128,
    geometry=GEOMETRY,
)
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {"attention": "dense"},
    "random": {"selection": "random"},
    "sparse": {},
    "sparse, keys drawn apart": {},
    "sparse, learned φ": {"compressor": "mlp"},
    "sparse, shared keys": {"shared_kv": True},
    "selected": {"attention": "selected"},
    "sparse, dropout 0.2": {"selected_dropout": 0.2},
    "sparse, exact": {"selection": "exact"},
    "sparse, taught": {"weight": 1.0},
    "sparse, taught, weight 0.1": {"weight": 0.1},
    "sparse, taught, weight 10": {"weight": 10.0},
    "sparse, learned φ, taught": {"compressor": "mlp", "weight": 1.0},
    "sparse, index": {"chooser": "index", "weight": 1.0},
    "sparse, index, weight 0.1": {"chooser": "index", "weight": 0.1},
    "sparse, index, weight 10": {"chooser": "index", "weight": 10.0},
    "sparse, index, sample 1/64": {"chooser": "index", "weight": 1.0, "stretch": 64},
    "sparse, index, sample 1/4": {"chooser": "index", "weight": 1.0, "stretch": 4},
    "sparse, learned φ, index": {"compressor": "mlp", "chooser": "index", "weight": 1.0},
    "selected, index": {"attention": "selected", "chooser": "index", "weight": 1.0},
}


class TwoTokens(nn.Module):
    """The embedding of a token plus another one of the token before it.

    Args:
        vocab_size: Tokens.
        dim: E.
        generator: Draws the weights.
    """

    def __init__(self, vocab_size: int, dim: int, generator: torch.Generator) -> None:
        super().__init__()
        self.own, self.previous = (nn.Embedding(vocab_size, dim) for _ in range(2))
        for table in (self.own, self.previous):
            nn.init.normal_(table.weight, std=0.02, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B, T, E]."""
        return self.own(tokens) + nn.functional.pad(self.previous(tokens[:, :-1]), (0, 0, 1, 0))


def make(variant: str, seed: int) -> DecoderLM:
    """An untrained model; those of a seed differ in the attention alone."""
    keys = {key: value for key, value in VARIANTS[variant].items() if key not in ("weight", "stretch")}
    model = DecoderLM(replace(CONFIG, **keys))
    model.init_weights(seed)
    if variant == "sparse, keys drawn apart":
        draw_keys_apart(model, seed)
    model.embedding = TwoTokens(CONFIG.vocab_size, CONFIG.dim, torch.Generator().manual_seed(seed))  # type: ignore[assignment]
    return model


def draw(parts: int, rows: int, *key: int) -> tuple[Tensor, Tensor]:
    """Documents and their targets, [rows, TOKENS / parts]."""
    length, pairs = TOKENS // parts, PAIRS // parts
    made = [associations(CONFIG.vocab_size, length, pairs, (*key, parts, row)) for row in range(rows)]
    tokens, targets = (torch.from_numpy(np.stack(part).astype(np.int64)) for part in zip(*made, strict=True))
    return tokens, targets


def teaching_of(
    model: DecoderLM, weight: float, stretch: int, step: int, batches: list[tuple[Tensor, Tensor]]
) -> list[ChoiceTeaching]:
    """What the choice is taught by each batch of a step."""
    eligible = sum(eligible_queries(model.config, tokens, None, step, stretch)[0] for tokens, _ in batches)
    scales = torch.full((1,), weight / max(1, eligible * CONFIG.num_kv_heads))
    return [
        ChoiceTeaching(torch.tensor(step), scales, torch.zeros(1, 2), tokens.shape[1], stretch) for tokens, _ in batches
    ]


def train(
    model: DecoderLM, steps: int, rows: int, rate: float, seed: int, weight: float = 0.0, stretch: int = 16
) -> Iterator[int]:
    """Train, with a warm-up and a cosine; yields the number of each step when it has been taken.

    `weight` is that of the choice's loss, of which one query in `stretch` is a sample.
    """
    index = [p for name, p in model.named_parameters() if ".index." in name]
    others = [p for name, p in model.named_parameters() if ".index." not in name]
    optimizer = make_optimizer(model, OptimizerSection(learning_rate=rate))
    for step in range(steps):
        progress = max(0.0, (step - WARM_UP) / (steps - WARM_UP))
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / WARM_UP, 0.55 + 0.45 * math.cos(math.pi * progress))
        batches = [draw(parts, rows * parts // len(PARTS), seed, step) for parts in PARTS]
        answers = sum(int((targets >= 0).sum()) for _, targets in batches)
        optimizer.zero_grad()
        taught = teaching_of(model, weight, stretch, step, batches) if weight else [None] * len(batches)
        for (tokens, targets), teaching in zip(batches, taught, strict=True):
            (model(tokens, targets, teaching=teaching) * (targets >= 0).sum() / answers).backward()
        for parameters in (others, index):
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        yield step + 1


def value_places(tokens: Tensor) -> Tensor:
    """Where the value of each token that is a key stands in its pair, [B, TOKENS]; other tokens have 0."""
    places = torch.zeros(len(tokens), CONFIG.vocab_size, dtype=torch.long)
    places.scatter_(1, tokens[:, 0 : 2 * PAIRS : 2], torch.arange(1, 2 * PAIRS, 2).expand(len(tokens), -1))
    return places.gather(1, tokens)


@torch.no_grad()
def measure(model: DecoderLM, seed: int) -> dict[str, float | None]:
    """Recall of whole documents, and the share of the choices that found the pair."""
    tokens, targets = draw(1, ROWS, seed, 1 << 30)
    with Choices() as choices:
        right = model(tokens).argmax(-1) == targets
    asked = targets >= 0
    found: dict[str, float | None] = {"recall": float(right[asked].double().mean()), "found": None, "chance": None}
    if not choices.found:
        return found
    value = value_places(tokens)
    query = torch.arange(TOKENS)
    block, own = value // GEOMETRY.selection_block_size, query // GEOMETRY.selection_block_size
    forced = GEOMETRY.num_initial_blocks + GEOMETRY.num_local_blocks
    free = asked & (block >= GEOMETRY.num_initial_blocks) & (block <= own - GEOMETRY.num_local_blocks)
    free &= (query - value >= GEOMETRY.window_size) & (own >= GEOMETRY.num_selected_blocks)
    hit = (choices.found[0] == block[..., None, None]).any(-1).any(-1)
    chance = ((GEOMETRY.num_selected_blocks - forced) / (own + 1 - forced)).expand(ROWS, -1)
    return found | {"found": float(hit[free].double().mean()), "chance": float(chance[free].mean())}


def run(variant: str, seed: int, steps: int, rows: int, rate: float) -> dict[str, Any]:
    """Train a model and measure it on the way."""
    torch.set_num_threads(1)
    model, row = make(variant, seed), {"attention": variant, "seed": seed}
    taught = {key: VARIANTS[variant][key] for key in ("weight", "stretch") if key in VARIANTS[variant]}
    for step in train(model, steps, rows, rate, seed, **taught):
        # Where the answers have just been learned, and the end.
        for name, last in (("early", max(1, steps * 2 // 5)), ("end", steps)):
            if step == last:
                row |= {f"{figure}_{name}": value for figure, value in measure(model, seed).items()}
    row["chance"] = row.pop("chance_end")
    del row["chance_early"]
    return row


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures of each variant over seeds, and the least recall of a seed."""
    table = []
    for variant in dict.fromkeys(row["attention"] for row in rows):
        own = [row for row in rows if row["attention"] == variant]
        line: dict[str, Any] = {"attention": variant, "seeds": len(own)}
        for name in ("recall_early", "recall_end", "found_early", "found_end", "chance"):
            values = [row[name] for row in own if row[name] is not None]
            line[name] = mean(values) if values else None
        table.append(line | {"least_recall": min(row["recall_end"] for row in own)})
    return table


def main() -> int:
    """Train and measure all variants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=18, help="rows of 256 tokens in a step")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = [
            pool.submit(run, variant, seed, options.steps, options.rows, options.learning_rate)
            for seed in options.seeds for variant in options.variants
        ]  # fmt: skip
        for one in waiting:
            rows.append(one.result())
            print(rows[-1], flush=True)
    file = ResultFile(
        "choice_learning", "Does the choice learn to find what a query asks for?", folder=options.output,
        device=cpu_name(), commit=options.commit,
    )  # fmt: skip
    notes = [
        f"One layer of width {CONFIG.dim}, {CONFIG.num_heads}/{CONFIG.num_kv_heads} heads of {CONFIG.head_dim}, "
        f"float32; {TOKENS} tokens, {PAIRS} pairs, {CONFIG.vocab_size // 2} keys; {GEOMETRY}.",
        f"{options.steps} steps of {options.rows} x {TOKENS} tokens, AdamW at {options.learning_rate:g}; early is "
        f"after {max(1, options.steps * 2 // 5)} steps. {ROWS} rows are measured.",
        "found: of the queries whose pair is neither in the window nor in a forced block, those whose block is chosen.",
    ]
    print(file.write(rows, notes=notes, means=means(rows)).read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
