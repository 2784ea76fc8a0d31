"""Exporting a trained model for use: weights, configuration and tokenizer, as transformers reads them too."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trifocal.data import Tokenizer
from trifocal.data.tokenizers import CONFIG_FILE as TOKENIZER_CONFIG_FILE
from trifocal.data.tokenizers import GENERATION_FILE, SPECIAL_IDS
from trifocal.errors import UserError
from trifocal.models import DecoderLM, save_weights
from trifocal.models.io import CONFIG_FILE
from trifocal.paths import read_json
from trifocal.runlog.whole_files import write_whole
from trifocal.train.checkpoint.manifest import CheckpointDamaged, describe_file, verify_files

WEIGHTS = "weights"
"""In the folder of a run: the model of the last checkpoint, for use."""
STEP_FILE = "trainer_state.json"


def export_weights(
    model: DecoderLM, tokenizer: Tokenizer, folder: Path, *, step: int, sequence_length: int | None = None
) -> None:
    """Write weights, configuration and tokenizer as Hugging Face names them, and `trainer_state.json`: the step, and
    size and SHA-256 of the weights. It is written last: without it, the files may be of different steps.
    """
    folder.mkdir(exist_ok=True)
    (folder / STEP_FILE).unlink(missing_ok=True)
    save_weights(model, folder, **write_tokenizer(tokenizer, model.config.vocab_size, folder, sequence_length))
    files = {path.name: describe_file(path) for path in sorted(folder.glob("*.safetensors"))}
    write_whole(folder / STEP_FILE, json.dumps({"global_step": step, "files": files}) + "\n")


def weights_step(folder: Path) -> int | None:
    """The step of weights that `export_weights` wrote; None if they do not tell."""
    try:
        step = read_json(folder / STEP_FILE).get("global_step")
    except UserError:
        return None
    return step if isinstance(step, int) else None


def verify_weights(folder: Path) -> None:
    """Refuse weights with a file that differs from what `export_weights` wrote; nothing is known of other weights."""
    if (folder / STEP_FILE).is_file():
        try:
            verify_files(folder, read_json(folder / STEP_FILE).get("files", {}))
        except CheckpointDamaged as error:
            raise CheckpointDamaged(f"{error}; take a checkpoint of its run instead (--checkpoint NAME)") from None
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(f"{folder / STEP_FILE} is damaged: its files have no sizes and SHA-256") from error


@contextlib.contextmanager
def new_model_folder(folder: Path) -> Iterator[Path]:
    """A place for the files of a new folder; they move there when all are written, `config.json` last. It is in the
    folder itself, which may be a mount point, a link, or the working directory.
    """
    absent = not folder.exists()
    if not absent and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already; give a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".model.", dir=folder) as name:
            place = Path(name)
            yield place
            for path in sorted(place.iterdir(), key=lambda path: path.name == CONFIG_FILE):
                path.replace(folder / path.name)
    except OSError as error:
        name = error.filename2 or error.filename or str(folder)
        raise UserError(f"{name}: {error.strerror}; {folder} was not written") from error
    finally:
        if absent:
            with contextlib.suppress(OSError):
                folder.rmdir()


def export_folder(model: DecoderLM, tokenizer: Tokenizer, folder: Path, *, sequence_length: int | None = None) -> None:
    """Write a new folder that transformers reads, as `export_weights` does into one that exists."""
    with new_model_folder(folder) as partial:
        settings = write_tokenizer(tokenizer, model.config.vocab_size, partial, sequence_length)
        save_weights(model, partial, **settings)


def write_tokenizer(
    tokenizer: Tokenizer, vocab_size: int, folder: Path, sequence_length: int | None = None
) -> dict[str, Any]:
    """Write a tokenizer, with a token for padding and the longest text, and `generation_config.json`; returns further
    keys of the model's `config.json`, for `save_weights`.
    """
    tokenizer.save(folder)
    generation, settings, of_tokenizer = dict(tokenizer.generation), dict[str, Any](), dict[str, Any]()
    path = folder / TOKENIZER_CONFIG_FILE
    content = json.loads(path.read_text(encoding="utf-8"))
    if sequence_length is not None:
        # Positions continue past it; tools that cut texts take it as the model's length.
        settings["max_position_embeddings"] = of_tokenizer["model_max_length"] = sequence_length
    # Not where tokens are drawn: they have no end.
    if tokenizer.separator < vocab_size:
        ends = [end for end in tokenizer.ends if end < vocab_size]
        generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        settings |= {name: generation[name] for name in SPECIAL_IDS if name in generation}
        # A row that has ended is filled up with its last token.
        generation.setdefault("pad_token_id", tokenizer.separator)
        if not content.get("pad_token"):
            of_tokenizer["pad_token"] = content["eos_token"]
    write_whole(path, json.dumps(content | of_tokenizer) + "\n")
    write_whole(folder / GENERATION_FILE, json.dumps(generation) + "\n")
    return settings
