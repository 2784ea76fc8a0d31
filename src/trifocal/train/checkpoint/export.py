"""Exporting a trained model for use: weights, configuration and tokenizer, as transformers reads them too."""

import contextlib
import fcntl
import json
import os
import re
import shutil
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
_PLACE = ".model."
"""Prefix of the place in a new folder where its files are written."""
_PLACE_NAME = re.compile(re.escape(_PLACE) + r"[a-z0-9_]{8}")


def export_weights(
    model: DecoderLM, tokenizer: Tokenizer, folder: Path, *, step: int, sequence_length: int | None = None
) -> None:
    """Write weights, configuration, tokenizer and step, in files of the names that Hugging Face gives them.

    `model.safetensors`, or shards with an index; `config.json`, `generation_config.json` and `modeling_trifocal.py`;
    `tokenizer.json` and `tokenizer_config.json`; and `trainer_state.json` with `global_step`, and size and SHA-256 of
    the files of weights.

    Args:
        model: The model itself, without wrappers.
        tokenizer: The tokenizer of the training data.
        folder: Made if it does not exist (its parent must); files of the same names are replaced.
        step: Optimizer steps done.
        sequence_length: Tokens of a sequence in training, if known.

    Raises:
        OSError: If a file cannot be written; without `trainer_state.json`, the files may be of different steps.
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
    """A place for the files of a new folder; they move there when all of them are written, `config.json` last.

    The place is in the folder itself, so that the folder may be a mount point, a link, or the working directory. The
    folder must not exist, be empty, or have only remains of a process that was killed: the process holds the system's
    lock on the place, and one that nobody holds is removed. After an error, the folder has what others put there, and
    nothing of this. Raises UserError, with the name, if there is something in the folder, another process writes there,
    or a file cannot be written.
    """
    absent, written = not folder.exists(), list[Path]()
    _remove_remains(folder)
    if not absent and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already; give a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=_PLACE, dir=folder))
        lock = os.open(partial, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror}") from error
    try:
        # A file system may have no locks: what is left on it stays.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # If two begin together, at least one sees the other here.
        if any(path.name != partial.name for path in folder.iterdir()):
            raise UserError(f"another process writes in {folder}; give a new folder")
        yield partial
        for path in sorted(partial.iterdir(), key=lambda path: path.name == CONFIG_FILE):
            target = folder / path.name
            if os.path.lexists(target):
                raise UserError(f"another process wrote {target} meanwhile; give a new folder")
            path.replace(target)
            written.append(target)
    except BaseException as error:
        for path in written:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            name = error.filename2 or error.filename or folder
            raise UserError(f"{name}: {error.strerror}; {folder} was not written") from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)
        if absent:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _remove_remains(folder: Path) -> None:
    """Remove the places of processes that were killed, if the folder has nothing else."""
    found = list(folder.iterdir()) if folder.is_dir() else []
    if not all(_PLACE_NAME.fullmatch(path.name) for path in found):
        return
    for path in found:
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(lock)


def export_folder(model: DecoderLM, tokenizer: Tokenizer, folder: Path, *, sequence_length: int | None = None) -> None:
    """Write a new folder that transformers reads; arguments as of `export_weights`, the folder and errors as of
    `new_model_folder`.
    """
    with new_model_folder(folder) as partial:
        settings = write_tokenizer(tokenizer, model.config.vocab_size, partial, sequence_length)
        save_weights(model, partial, **settings)


def write_tokenizer(
    tokenizer: Tokenizer, vocab_size: int, folder: Path, sequence_length: int | None = None
) -> dict[str, Any]:
    """Write a tokenizer, with a token for padding and the longest text, and its settings in `generation_config.json`.

    Returns further keys of the model's `config.json`, for `save_weights`. Raises OSError if a file cannot be written.
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
