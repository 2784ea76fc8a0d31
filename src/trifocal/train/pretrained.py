"""Loading a trained model from a run, from one of its checkpoints, or from a folder of exported weights."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from trifocal.data import Tokenizer, load_tokenizer, make_tokenizer
from trifocal.data.tokenizers import CONFIG_FILE as TOKENIZER_CONFIG_FILE
from trifocal.errors import UserError
from trifocal.models import DecoderLM, ModelConfig
from trifocal.models.io import CONFIG_FILE as MODEL_CONFIG_FILE
from trifocal.models.io import load_weights, read_config
from trifocal.train.checkpoint_folders import list_checkpoints, open_checkpoint
from trifocal.train.manifest import MANIFEST
from trifocal.train.run_config import RunConfig
from trifocal.train.run_directory import load_run
from trifocal.train.run_files import CONFIG_FILE


@dataclass(frozen=True)
class Pretrained:
    """A trained model on the disk."""

    path: Path
    """The checkpoint, or the folder of weights."""
    run: RunConfig | None
    """The configuration of its run, if that is known."""

    @property
    def _exported(self) -> bool:
        return (self.path / MODEL_CONFIG_FILE).is_file()

    def config(self) -> ModelConfig:
        """The model's configuration.

        Raises:
            UserError: If it cannot be read.
        """
        if self._exported:
            return read_config(self.path)
        if self.run is not None:
            return self.run.model
        from trifocal.train.checkpoint import read_model_config

        return read_model_config(self.path)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the model was trained with.

        Raises:
            UserError: If it is not known, or cannot be read.
        """
        if self.run is not None and not (self.path / TOKENIZER_CONFIG_FILE).is_file():
            return make_tokenizer(self.run.data.tokenizer, separator=self.run.data.separator)
        if not self._exported:
            raise UserError(
                f"{self.path} is a checkpoint without its run, which names the tokenizer; give it where it was "
                "written, in RUN_DIR/checkpoints"
            )
        return load_tokenizer(self.path)

    def model(self) -> DecoderLM:
        """The model with its weights, on the CPU.

        Raises:
            UserError: If they cannot be read, or do not fit.
        """
        if self._exported:
            return load_weights(self.path)
        # Imported here: PyTorch's checkpoints bring its distributed packages.
        from trifocal.train.checkpoint import load_model_weights

        config = self.config()
        with torch.device("meta"):
            model = DecoderLM(config)
        model.to_empty(device="cpu")
        load_model_weights(self.path, model=model, model_config=config)
        return model


@contextlib.contextmanager
def open_pretrained(
    path: Path, checkpoint: str = "", *, command: str = "trifocal generate RUN_DIR"
) -> Iterator[Pretrained]:
    """Find a trained model; while the context lasts, a run that still trains does not delete it.

    Args:
        path: A run (its newest checkpoint is taken), a checkpoint, or a folder of weights.
        checkpoint: Another checkpoint of the run, by its name.
        command: The user's command, for advice.

    Raises:
        UserError: If there is none, or it is damaged.
    """
    if (path / MODEL_CONFIG_FILE).is_file():
        if checkpoint:
            raise UserError(f"{path} holds weights and no checkpoints; leave --checkpoint out, or give the run")
        # The run's configuration gives the length of its rows and its precision.
        run = path.parent
        yield Pretrained(path, load_run(run) if (run / CONFIG_FILE).is_file() else None)
    elif (path / MANIFEST).exists():
        if checkpoint:
            raise UserError(f"{path} is a checkpoint itself; leave --checkpoint {checkpoint} out")
        # The path may be `.`.
        path = path.resolve()
        run = path.parent.parent
        with open_checkpoint(path.parent, path.name, command=command) as found:
            yield Pretrained(found, load_run(run) if (run / CONFIG_FILE).is_file() else None)
    else:
        config = load_run(path)
        if not checkpoint and not list_checkpoints(path / "checkpoints") and (path / "weights").is_dir():
            yield Pretrained(path / "weights", config)
            return
        with open_checkpoint(path / "checkpoints", checkpoint, command=command) as found:
            yield Pretrained(found, config)
