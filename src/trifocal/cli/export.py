"""`trifocal export`: a trained model as a folder that transformers reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from trifocal.cli.flags import parse_arguments
from trifocal.paths import shell_path, user_path
from trifocal.train.checkpoint.export import export_folder
from trifocal.train.checkpoint.pretrained import open_pretrained, pretrained_path


@dataclass(frozen=True, kw_only=True)
class ExportArguments:
    """Write a trained model, with its tokenizer, as a folder that transformers reads."""

    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """A run, also while it trains; one of its checkpoints; a folder of weights; or demo, that of the package."""
    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """The new folder."""
    checkpoint: str = ""
    """A checkpoint of the run, like step_00000500; the newest by default."""


def run(args: Sequence[str]) -> int:
    """Write the folder, and say how to load it."""
    options: ExportArguments = parse_arguments(ExportArguments, args, prog="trifocal export")
    path, folder = pretrained_path(options.path, "RUN_DIR"), user_path(options.folder, "DIR")
    found = open_pretrained(path, options.checkpoint)
    model, tokenizer, length = found.model(), found.tokenizer(), found.sequence_length()
    export_folder(model, tokenizer, folder, sequence_length=length)
    print(
        f"{found.path} is in {folder}; in Python:\n"
        "  import trifocal.hf, transformers\n"
        f"  model = transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})\n"
        f"  tokenizer = transformers.AutoTokenizer.from_pretrained({str(folder)!r})\n"
        f"in lm-eval:\n  lm_eval --model hf --model_args pretrained={shell_path(folder)} --trust_remote_code --tasks …"
    )
    return 0
