"""Packed fine-tuning by transformers' Trainer beside Trifocal's own trainer: tokens a second, in one process.

    python benchmarks/finetune_speed.py --sequences 8 32
    python benchmarks/finetune_speed.py --config minimal.toml --sequences 2 --tokens 64 --steps 3 --no-compile

Every row trains the same model on the same documents, in bf16 on a GPU, with fused AdamW. It is the preset's with the
paper's choice of blocks: transformers' Trainer has no loss that would teach an index. The documents are laid one
behind the other in a batch of one row, by transformers' own collator. "compiled" is the trainer's `torch_compile=True`.
The fastest row of our own trainer is the measure.
"""

import argparse
import gc
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import SequentialSampler

from lib.results import ResultFile
from lib.timing import Timing
from lib.training_worker import TrainBench, TrainCase, document_boundaries
from trifocal.hf import TrifocalForCausalLM
from trifocal.models import DecoderLM, ModelConfig
from trifocal.train import load_config

ROOT = Path(__file__).parent.parent
OURS = "trifocal"


class StepTimes(transformers.TrainerCallback):
    """The time of each step, without waiting for the GPU."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._marks: list[Any] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        mark: Any = torch.cuda.Event(enable_timing=True) if self._on_gpu else time.perf_counter()
        if self._on_gpu:
            mark.record()
        self._marks.append(mark)

    def milliseconds(self, steps: int) -> list[float]:
        """Milliseconds of each of the last steps."""
        if self._on_gpu:
            torch.cuda.synchronize()
        marks = self._marks[-steps - 1 :]
        return [a.elapsed_time(b) if self._on_gpu else (b - a) * 1000 for a, b in pairwise(marks)]


class InOrder(transformers.Trainer):
    """A trainer whose batches all have the same documents."""

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def row(name: str, timing: Timing, sequences: int, tokens: int, compiled: bool, on_gpu: bool) -> dict[str, Any]:
    """One row of the result."""
    return {
        "trainer": name,
        "compiled": compiled,
        "sequences": sequences,
        "tokens_per_second": sequences * tokens / timing.median_ms * 1000,
        "step_ms": timing.median_ms,
        "step_p20_ms": timing.p20_ms,
        "step_p80_ms": timing.p80_ms,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
    }


def free() -> None:
    """Give back the memory of the row before."""
    if torch.cuda.is_available():
        gc.collect()
        torch.compiler.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure_ours(
    config: ModelConfig, options: argparse.Namespace, sequences: int, graphs: bool, device: str
) -> dict[str, Any]:
    """Steps of our own trainer."""
    case = TrainCase(
        size="", model=config.to_dict(), sequences=sequences, micro_batch=sequences, tokens=options.tokens,
        checkpointing="none", compile=options.compile, cuda_graphs=graphs,
        precision="bf16" if device == "cuda" else "fp32", warmup_steps=options.warmup, timed_steps=options.steps,
        device=device, data="text",
    )  # fmt: skip
    bench = TrainBench(case)
    bench.warm_up()
    figures = bench.figures()
    timing = Timing(*(figures[name] for name in ("step_ms", "step_p20_ms", "step_p80_ms", "timed_steps")))
    name = f"{OURS}, CUDA graphs" if graphs else OURS
    found = row(name, timing, sequences, options.tokens, options.compile, device == "cuda")
    return found | {"peak_gib": figures["peak_gib"]}


def measure_theirs(
    config: ModelConfig, options: argparse.Namespace, sequences: int, compiled: bool, device: str
) -> dict[str, Any]:
    """Steps of transformers' trainer."""
    lengths = document_boundaries(sequences, options.tokens).diff().tolist()
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    steps = options.warmup + options.steps
    data = [{"input_ids": document} for document in documents] * steps
    decoder = DecoderLM(config)
    decoder.init_weights(0)
    model = TrifocalForCausalLM.from_decoder(decoder)
    times = StepTimes(device == "cuda")
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=len(lengths), bf16=device == "cuda",
            torch_compile=compiled,
            use_cpu=device == "cpu", optim="adamw_torch_fused", learning_rate=1e-4, weight_decay=0.01,
            logging_steps=steps, save_strategy="no", report_to=[], disable_tqdm=True, logging_nan_inf_filter=False,
            dataloader_num_workers=2 if device == "cuda" else 0, dataloader_pin_memory=device == "cuda",
        )  # fmt: skip
        collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        trainer = InOrder(model, arguments, train_dataset=data, data_collator=collator, callbacks=[times])
        trainer.train()
    timing = Timing.of(times.milliseconds(options.steps))
    return row("transformers.Trainer", timing, sequences, options.tokens, compiled, device == "cuda")


def main() -> int:
    """Measure every row, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="m7c_125m.toml")
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path, default=None)
    options, flags = parser.parse_known_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = load_config(ROOT / "configs" / options.config, ["--model.chooser", "compressed", *flags]).model
    rows = []
    for sequences in options.sequences:
        found = []
        for graphs in (True, False) if device == "cuda" and options.compile else (False,):
            found.append(measure_ours(config, options, sequences, graphs, device))
            print(found[-1], flush=True)
            free()
        for compiled in (True, False) if options.compile else (False,):
            found.append(measure_theirs(config, options, sequences, compiled, device))
            print(found[-1], flush=True)
            free()
        fastest = max(entry["tokens_per_second"] for entry in found if entry["trainer"].startswith(OURS))
        rows += [entry | {"share_of_trifocal": entry["tokens_per_second"] / fastest} for entry in found]
    notes = [
        f"{options.config} with model.chooser {config.chooser}; sequences x {options.tokens:,} tokens a step, in "
        "documents with a median length of 1,000 tokens. Medians over the timed steps.",
        "share_of_trifocal: tokens a second over those of our own trainer's fastest row of that size.",
        f"transformers {transformers.__version__}.",
    ]
    file = ResultFile("finetune_speed", "Packed fine-tuning", folder=options.output, commit=options.commit)
    print(file.write(rows, notes=notes).read_text(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
