"""`trifocal train`: start a run, or resume one."""

import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from trifocal.cli.flags import show_help
from trifocal.cli.output import discard_lost_output, printable, try_next
from trifocal.cli.threads import Threads
from trifocal.distributed.peers import PeerLost
from trifocal.distributed.processes import hard_exit, rank_and_size
from trifocal.errors import UserError
from trifocal.fields import HELP, dotted_fields, read_flags
from trifocal.paths import shell_path, user_path
from trifocal.runlog.progress import try_print
from trifocal.train.config.check import choose_device
from trifocal.train.config.load import ALIASES, load_config, override
from trifocal.train.config.sections import RunConfig
from trifocal.train.launch import prolong_command, resume, resume_command, train
from trifocal.train.loop import TrainResult
from trifocal.train.nonfinite import NonFiniteError
from trifocal.train.run_folder import load_run
from trifocal.train.stop import StoppedBeforeFirstStep

_OWN_FLAGS = {"resume": str, "checkpoint": str, "overwrite": bool}
_FIRST_HELP = """\
usage: trifocal train CONFIG [--section.key value …]      CONFIG: a TOML file, or a preset (trifocal new lists them)
       trifocal train --resume RUN_DIR [--section.key value …]

examples:
  trifocal train showcase
  trifocal train showcase --data.source text:./books --steps 5000 --run.directory runs/books
  trifocal train base_125m --model.attention dense --run.directory runs/dense
  trifocal train --resume runs/books --steps 10000
  torchrun --nproc-per-node=2 -m trifocal train base_125m

the flags that people need:
  --run.directory DIR           folder of the run; {n} in it becomes the first number that is free
  --overwrite                   rename the run that is there, and begin in its place
  --resume RUN_DIR              continue a run
  --data.source SOURCE ...      builtin, text:PATH, jsonl:PATH#field, parquet:PATH#field, hf:NAME#field
  --steps N                     optimizer steps (train.steps)
  --batch-size N                sequences in a step, over all processes (train.global_batch_size)
  --train.micro_batch_size N    sequences in a forward and backward pass, at most: lower it if memory runs out
  --train.sequence_length N     tokens in a sequence
  --lr RATE                     peak learning rate (optimizer.learning_rate)
  --train.precision bf16        bf16 matrix products, on hardware that has them

all flags:
"""


@dataclass(frozen=True, kw_only=True)
class TrainArguments(RunConfig):
    """Train a model from a TOML config, or continue a run. Flags override the fields of the config."""

    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")] = ""
    """The TOML file, or the name of a preset. Not with --resume; with --model.from it may be left out."""
    resume: str = ""
    """Continue the run in this folder, from its newest checkpoint."""
    checkpoint_name: Annotated[str, tyro.conf.arg(name="checkpoint")] = ""
    """With --resume: continue from this checkpoint of the run instead, like step_00000500; later ones are deleted."""
    overwrite: Annotated[bool, tyro.conf.arg(metavar="(no value)")] = False
    """Rename the run that is in run.directory to NAME.old-1, -2, …, and begin in its place."""


def run(args: Sequence[str], *, advise: bool = True) -> int:
    """Train, and print the next commands unless told not to: then it is a step of a command, and a signal that asked to
    stop gives the status 1, so that the command ends too.
    """
    try:
        return _run(args, advise)
    finally:
        discard_lost_output()


def _run(args: Sequence[str], advise: bool) -> int:
    paths, overrides = read_flags(dotted_fields(RunConfig) | _OWN_FLAGS, args, switches=("overwrite",), aliases=ALIASES)
    if HELP & set(paths):
        print(_FIRST_HELP)
        show_help(TrainArguments, prog="trifocal train", use_underscores=True)
    own = {name: overrides.pop(name) for name in _OWN_FLAGS if name in overrides}
    try:
        config, result = _resume(paths, own, overrides) if "resume" in own else _train(paths, own, overrides)
    except (NonFiniteError, FloatingPointError, torch.OutOfMemoryError) as error:
        try_print(printable("; ".join([f"trifocal: {error}", *getattr(error, "__notes__", ())])), sys.stderr)
        return 1
    except StoppedBeforeFirstStep as stopped:
        # PyTorch's own end would wait for compilers that still work.
        hard_exit(stopped.status)
    except PeerLost as error:
        try_print(printable(f"trifocal: {error}"), sys.stderr)
        hard_exit(1)
    summary = _summary(config, result, advise)
    if summary:
        try_print(summary)
    if rank_and_size()[1] > 1:
        hard_exit(0)
    return int(not advise and result.stop_requested)


def _train(paths: list[str], own: dict[str, Any], overrides: dict[str, Any]) -> tuple[RunConfig, TrainResult]:
    if len(paths) > 1 or not (paths or "model.from" in overrides):
        given = f"got {' '.join(paths)}" if paths else "got none"
        raise UserError(f"expected one TOML file or preset, {given}; try trifocal train showcase")
    if "checkpoint" in own:
        raise UserError("--checkpoint goes with --resume RUN_DIR")
    config = numbered(load_config(paths[0] if paths else None, overrides))
    return config, train(config, overwrite="overwrite" in own, before_step=_before_step(config))


def numbered(config: RunConfig) -> RunConfig:
    """The config with the first number whose folder is free in place of `{n}` in `run.directory`."""
    name = config.run.directory
    if "{n}" not in name:
        return config
    if rank_and_size()[1] > 1 or "TORCHELASTIC_RESTART_COUNT" in os.environ:
        raise UserError(f"--run.directory {name}: under a launcher give the folder a name without {{n}}")
    folders = (name.replace("{n}", str(number)) for number in itertools.count(1))
    return override(config, {"run.directory": next(folder for folder in folders if not Path(folder).exists())})


def _resume(paths: list[str], own: dict[str, Any], overrides: dict[str, Any]) -> tuple[RunConfig, TrainResult]:
    if paths:
        raise UserError(f"--resume takes the run's own config; leave {paths[0]} out")
    if "overwrite" in own:
        raise UserError("--overwrite and --resume contradict each other")
    if "model.from" in overrides:
        raise UserError("--model.from begins a new run, and --resume continues one; leave one of them out")
    directory = user_path(own["resume"], "--resume")
    saved = load_run(directory)
    config = override(saved, overrides)
    if config.run.directory != saved.run.directory and Path(config.run.directory).resolve() != directory.resolve():
        raise UserError(f"--resume continues in {directory}; leave --run.directory {config.run.directory} out")
    checkpoint = own.get("checkpoint", "")
    return config, resume(directory, checkpoint=checkpoint, config=config, before_step=_before_step(config))


def _before_step(config: RunConfig) -> Callable[[], str]:
    # Compiled code has its number of threads; another one would compile it anew.
    fixed = config.run.deterministic or config.train.compile
    return Threads(choose_device(config.run.device), fixed=fixed).look


def _summary(config: RunConfig, result: TrainResult, advise: bool) -> str:
    if not result.is_rank0:
        # Rank 0 speaks for all.
        return ""
    directory = shell_path(result.directory)
    number = result.skipped_documents
    skipped = f"\nskipped {number} bad document{'s'[: number != 1]} (data.on_bad_document)" if number else ""
    if not result.finished:
        command = f"; continue with:\n  {resume_command(result.directory)}" if advise else ""
        return f"\nstopped at step {result.step}, which is saved{command}{skipped}"
    lines = [f"\nfinished {result.step} steps in {result.directory}{skipped}"]
    if result.evaluation is not None:
        bits = result.evaluation.bits_per_byte
        lines.append(
            f"validation loss {result.evaluation.validation_loss:.4f} nats per token, perplexity "
            f"{result.evaluation.perplexity:.2f}" + (f", {bits:.3f} bits per byte" if bits is not None else "")
        )
    if result.sample is not None:
        lines += ["", "a sample:", *(f"  | {line}" for line in printable(result.sample).splitlines())]
    if not advise:
        return "\n".join(lines)
    report = f"trifocal report {directory}"
    if importlib.util.find_spec("plotly") is None:
        report = f"pip install 'trifocal[report]' && {report}"
    prompt = "import " if "builtin" in config.data.sources else "the beginning of a text"
    generate = {"continue a text of yours": f'trifocal generate {directory} --prompt "{prompt}"'}
    advice = {
        **({} if result.evaluation is not None and result.evaluation.bits_per_byte is None else generate),
        "measure what it can do": f"trifocal evaluate {directory}",
        "see the run on one page": report,
        "train on, to twice the steps": prolong_command(result.directory, 2 * result.step),
        "prove this installation right": "trifocal check",
    }
    return "\n".join([*lines, try_next(advice)])
