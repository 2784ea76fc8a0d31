"""Loading a trained model from a run, one of its checkpoints, a folder of exported weights, or a dense one of Hugging
Face.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trifocal.data import Tokenizer, make_tokenizer
from trifocal.data.tokenizers import TOKENIZER_FILE, ByteTokenizer
from trifocal.errors import UserError
from trifocal.fields import dotted_fields, value_of
from trifocal.models import DecoderLM, ModelConfig
from trifocal.models.decoder import meta_model
from trifocal.models.hf_reader import is_hf_folder, read_hf_config, read_hf_model, read_hf_settings
from trifocal.models.io import CONFIG_FILE as MODEL_CONFIG_FILE
from trifocal.models.io import load_weights, read_config
from trifocal.ops.devices import computes_bf16
from trifocal.paths import read_json, shell_path, user_path
from trifocal.train.checkpoint.export import WEIGHTS, verify_weights, weights_step
from trifocal.train.checkpoint.folders import checkpoint_step, find_checkpoint, list_checkpoints
from trifocal.train.checkpoint.manifest import MANIFEST, read_manifest
from trifocal.train.checkpoint.save_load import load_model_weights, model_differences, read_model_config
from trifocal.train.config.sections import RunConfig
from trifocal.train.run_folder import CONFIG_FILE, is_run, load_run, run_of

DEMO = "demo"
"""Name of the model that comes with the package."""
DEMO_FOLDER = Path(__file__).parents[2] / "demo_model"


@dataclass(frozen=True)
class Pretrained:
    """A trained model on the disk."""

    path: Path
    """The checkpoint, or the folder of weights, ours or a dense model of Hugging Face."""
    run: RunConfig | None
    """The configuration of its run, if that is known."""

    @property
    def _exported(self) -> bool:
        return (self.path / MODEL_CONFIG_FILE).is_file()

    def config(self) -> ModelConfig:
        """The model's configuration; UserError if it cannot be read."""
        if self._exported:
            return read_hf_config(self.path) if is_hf_folder(self.path) else read_config(self.path)
        if self.run is not None:
            return self.run.model
        return read_model_config(self.path)

    def sequence_length(self) -> int | None:
        """Tokens of a sequence in training, or a folder's `max_position_embeddings`; None: not known."""
        if self.run is not None:
            return self.run.train.sequence_length
        return read_hf_settings(self.path).get("max_position_embeddings") if self._exported else None

    def step(self) -> int | None:
        """The step of the checkpoint, or of exported weights; None if they do not tell."""
        return weights_step(self.path) if self._exported else int(read_manifest(self.path)["step"])

    def dtype(self, device: torch.device) -> torch.dtype:
        """Type of the products: bf16 if the model was trained in it, or its files have 16 bits, and on a GPU for all
        weights without a run; but fp32, four times as fast with a prompt, on a CPU without instructions for bf16.
        """
        stored = read_json(self.path / MODEL_CONFIG_FILE) if self._exported else {}
        # The second is transformers' older name.
        half = stored.get("dtype", stored.get("torch_dtype")) in ("bfloat16", "float16")
        works_in_half = device.type == "cuda" if self.run is None else self.run.train.precision != "fp32"
        if not (half or works_in_half):
            return torch.float32
        return torch.bfloat16 if computes_bf16(device) else torch.float32

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the model was trained with; UserError if it is not known, or cannot be read."""
        if place := self.tokenizer_place():
            return make_tokenizer(place[0], separator=place[1])
        if self._exported:
            raise UserError(f"{self.path} has no {TOKENIZER_FILE}: copy the files of the model's tokenizer into it")
        raise UserError(
            f"{self.path} is a checkpoint without its run, which names the tokenizer; give it where it was "
            "written, in RUN_DIR/checkpoints"
        )

    def tokenizer_place(self) -> tuple[str, str] | None:
        """What `make_tokenizer` takes: the name of the tokenizer, and its separator; None: not known."""
        # A run that has ended has a copy: its data.tokenizer may be a path from another folder.
        copy = self.path if self._exported else self.path.parent.parent / WEIGHTS
        if (self._exported or self.run is not None) and (copy / TOKENIZER_FILE).is_file():
            return str(copy), ""
        return None if self.run is None else (self.run.data.tokenizer, self.run.data.separator)

    def model(self) -> DecoderLM:
        """The model with its weights, on the CPU; UserError if they cannot be read, or do not fit."""
        if self._exported and not is_hf_folder(self.path):
            return load_weights(self.path)
        config = self.config()
        model = meta_model(config)
        if self._exported:
            model.load_state_dict(read_hf_model(self.path)[1], assign=True)
        else:
            load_model_weights(self.path, model=model, model_config=config)
        return model


def pretrained_path(text: str | os.PathLike[str], name: str) -> Path:
    """The path of the trained model that the user means: `demo` is that of the package, unless a file has this name."""
    path = user_path(text, name)
    if os.fspath(text) != DEMO:
        return path
    if not path.exists():
        return DEMO_FOLDER
    print(f"note: {DEMO} is {path.absolute()}, not the model that comes with the package", file=sys.stderr)
    return path


def load_model(folder: str | Path) -> DecoderLM:
    """Build a trained model, on the CPU, in the type of its files.

    Args:
        folder: A folder that `save_weights` or `trifocal.hf` wrote, such as `weights` of a run; or a run (its newest
            checkpoint); or one of its checkpoints; or a dense model of Hugging Face that `trifocal convert` reads; or
            `demo`, the model that comes with the package.

    Raises:
        UserError: If a file is missing or broken, or a tensor does not fit the configuration; the message names it.
    """
    return open_pretrained(pretrained_path(folder, "the folder of the model")).model()


def pretrained_values(folder: str, *, tokenizer: bool = True) -> dict[str, Any]:
    """The settings that a run takes from the weights it begins with, by dotted key: the section `model` without
    `model.from`, and the tokenizer if known and wanted.
    """
    found = open_pretrained(user_path(folder, "model.from"))
    config = found.config()
    values = {f"model.{name}": value_of(config, name) for name in dotted_fields(ModelConfig) if name != "from"}
    if tokenizer and (place := found.tokenizer_place()):
        loaded = make_tokenizer(place[0], separator=place[1])
        name = ByteTokenizer.name if isinstance(loaded, ByteTokenizer) else place[0]
        values |= {"data.tokenizer": name, "data.separator": loaded.separator_token}
    return values


def load_pretrained_weights(model: DecoderLM, folder: str) -> list[str]:
    """Copy trained weights into a model, in its type, and return the settings in which the two models differ; UserError
    with these if a tensor does not fit.
    """
    found = open_pretrained(user_path(folder, "model.from"))
    theirs, weights = found.config(), found.model().state_dict()
    mine = model.state_dict()
    misfits = sorted(weights.keys() ^ mine.keys()) or [n for n in mine if mine[n].shape != weights[n].shape]
    differences = model_differences(theirs, model.config)
    if misfits:
        raise UserError(
            f"model.from {folder} belongs to a different model: {'; '.join(differences)} (the tensor {misfits[0]} does "
            "not fit)"
        )
    model.load_state_dict(weights)
    return differences


def load_frozen(folder: str, vocab_size: int, tokenizer: Tokenizer, device: torch.device) -> DecoderLM:
    """The model of `distill.from`, without gradients, in its files' type; UserError if its vocabulary is another."""
    try:
        found = open_pretrained(user_path(folder, "distill.from"))
    except UserError as error:
        raise UserError(f"distill.from: {error}") from error
    frozen = found.model()
    theirs = found.tokenizer() if found.tokenizer_place() else tokenizer
    if frozen.config.vocab_size != vocab_size:
        raise UserError(
            f"distill.from {folder} has a vocabulary of {frozen.config.vocab_size:,} tokens, the model {vocab_size:,}; "
            "both need the same tokenizer"
        )
    if theirs.fingerprint != tokenizer.fingerprint:
        # Another template or separator changes no token.
        for token in range(min(theirs.vocab_size, tokenizer.vocab_size)):
            text, expected = theirs.token_text(token), tokenizer.token_text(token)
            if text != expected:
                raise UserError(
                    f"distill.from {folder} has another tokenizer: token {token} is {text!r} there, {expected!r} here"
                )
    return frozen.to(device).requires_grad_(False).eval()


def find_gguf(path: Path) -> Path | None:
    """The GGUF that a path means: itself, or the only one in a folder that is no run and has no safetensors; None:
    another model. A `config.json` beside it may only name the architecture.
    """
    if path.is_file() and path.suffix == ".gguf":
        return path
    if not path.is_dir() or is_run(path) or any(path.glob("*.safetensors")):
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise UserError(f"{path} has {len(found)} GGUF files; name one of them, such as {found[0]}")
    return found[0] if found else None


def open_pretrained(path: Path, checkpoint: str = "") -> Pretrained:
    """Find a trained model: a checkpoint, a folder of weights, or of a run its weights, if they have its newest step,
    else its newest checkpoint; or another one by name.
    """
    if find_gguf(path):
        raise UserError(f"{path} is a GGUF; convert it first: trifocal convert {shell_path(path)} OUT --to dense")
    if (path / MODEL_CONFIG_FILE).is_file():
        if checkpoint:
            raise UserError(f"{path} holds weights and no checkpoints; leave --checkpoint out, or give the run")
        # The run's configuration gives the length of its rows and its precision. The path may be `.`.
        return Pretrained(path, run_of(path.resolve().parent))
    if (path / MANIFEST).exists():
        if checkpoint:
            raise UserError(f"{path} is a checkpoint itself; leave --checkpoint {checkpoint} out")
        # The path may be `.`.
        path = path.resolve()
        found = find_checkpoint(path.parent, path.name, optimizer=False)
        return Pretrained(found, run_of(path.parent.parent))
    if (path / "adapter_config.json").is_file():
        raise UserError(f"{path} has only an adapter; merge it into its model first (PEFT: merge_and_unload)")
    if path.is_dir() and not (path / CONFIG_FILE).is_file():
        raise UserError(f"there is no run at {path}, nor weights: it has no {CONFIG_FILE}, and no {MODEL_CONFIG_FILE}")
    config, weights, checkpoints = load_run(path), path / WEIGHTS, list_checkpoints(path / "checkpoints")
    newest = checkpoint_step(checkpoints[-1]) if checkpoints else weights_step(weights)
    if not checkpoint and (weights / MODEL_CONFIG_FILE).is_file() and weights_step(weights) == newest:
        verify_weights(weights)
        return Pretrained(weights, config)
    return Pretrained(find_checkpoint(path / "checkpoints", checkpoint, optimizer=False), config)
