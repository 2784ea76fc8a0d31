"""The model that comes with the package, from a run: weights in bf16, configuration, tokenizer, and a page about it.

    trifocal train python
    python benchmarks/demo_model.py runs/python

The folder `src/trifocal/demo_model` is replaced. `trifocal generate demo` and `trifocal.load_model("demo")` read it.
"""

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from trifocal.errors import UserError
from trifocal.fields import dotted_fields, value_of
from trifocal.models import parameter_count
from trifocal.models.io import CONFIG_FILE, MODELING_FILE
from trifocal.runlog.run import Run, read_run
from trifocal.train import RunConfig, load_config
from trifocal.train.checkpoint.export import export_folder
from trifocal.train.checkpoint.pretrained import DEMO_FOLDER, open_pretrained
from trifocal.train.run_folder import load_run

PRESET = "python"
# What a run needs to lie elsewhere.
_ELSEWHERE = {"run.directory", "run.device"}
_PAGE = """\
# The model `demo`

A model of Python's source text to try Trifocal with: {parameters:,} parameters in bf16, tokens are bytes.
{step:,} of {steps:,} steps of {rows} rows of {length:,} bytes. Validation loss at step {measured:,}, before the weights
were rounded to bf16: {loss:.4f} nats a byte, {bits:.4f} bits, on files that training never saw.

```sh
{command}
python benchmarks/demo_model.py {directory}
```

## Text and licences

The text is the standard library of CPython {python}: its `.py` files outside the test suites. Copyright © 2001 Python
Software Foundation; All Rights Reserved. It is used under the PSF License Agreement,
<https://docs.python.org/3/license.html>, where the licences of the software in it are listed too. The model can repeat
passages of this text.

The weights are under Apache-2.0, the licence of Trifocal.
"""


def command_of(config: RunConfig) -> str:
    """The command that trains by a configuration: the preset, and a flag for each key that differs from it."""
    preset = load_config(PRESET)
    flags = []
    for name in dotted_fields(RunConfig):
        if name not in _ELSEWHERE and value_of(config, name) != value_of(preset, name):
            value = value_of(config, name)
            flags += [f"--{name}", shlex.quote(str(value).lower() if isinstance(value, bool) else str(value))]
    return " ".join(["trifocal train", PRESET, *flags])


def page(run: Run, config: RunConfig, step: int) -> str:
    """The README of the folder."""
    if config.data.source != "builtin" or config.data.include_site_packages:
        raise UserError(f"{run.directory} read other text than the standard library, whose licence the page gives")
    evaluations = [row for row in run.of_kind("evaluation") if row["step"] <= step]
    if not evaluations:
        raise UserError(f"{run.directory} has no validation loss up to step {step:,}, that of its weights")
    return _PAGE.format(
        parameters=parameter_count(config.model),
        step=step,
        steps=config.train.steps,
        measured=evaluations[-1]["step"],
        rows=config.train.global_batch_size,
        length=config.train.sequence_length,
        loss=evaluations[-1]["validation_loss"],
        bits=evaluations[-1]["bits_per_byte"],
        command=command_of(config),
        directory=load_config(PRESET).run.directory,
        python=run.environment["python"],
    )


def write_folder(directory: Path, folder: Path) -> None:
    """Replace all files of a folder by those of a run's weights."""
    config = load_run(directory)
    weights = directory / "weights"
    with tempfile.TemporaryDirectory() as temporary:
        exported = Path(temporary) / "exported"
        found = open_pretrained(weights)
        step = json.loads((weights / "trainer_state.json").read_text())["global_step"]
        text = page(read_run(directory), config, step)
        model = found.model().to(torch.bfloat16)
        export_folder(model, found.tokenizer(), exported, sequence_length=config.train.sequence_length)
        # Code in this folder would make it a package of Python's. `trifocal export demo DIR` writes what is left out.
        (exported / MODELING_FILE).unlink()
        values: dict[str, Any] = json.loads((exported / CONFIG_FILE).read_text())
        del values["auto_map"]
        (exported / CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n")
        (exported / "README.md").write_text(text, encoding="utf-8")
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            path.unlink()
        for path in exported.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())


def main() -> int:
    """Write the folder, and print its page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help=f"a run of the preset {PRESET}")
    parser.add_argument("--output", type=Path, default=DEMO_FOLDER)
    options = parser.parse_args()
    try:
        write_folder(options.run, options.output)
    except UserError as error:
        parser.error(str(error))
    print((options.output / "README.md").read_text(encoding="utf-8"))
    print(f"{sum(path.stat().st_size for path in options.output.iterdir()):,} bytes in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
