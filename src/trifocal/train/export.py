"""Exporting a trained model for use: weights, configuration and tokenizer."""

import json
from pathlib import Path

from trifocal.data import Tokenizer
from trifocal.models import DecoderLM, save_weights
from trifocal.runlog.whole_files import write_whole

WEIGHTS = "weights"
"""In the folder of a run: the model of the last checkpoint, for use."""
STEP_FILE = "trainer_state.json"


def export_weights(model: DecoderLM, tokenizer: Tokenizer, folder: Path, *, step: int) -> None:
    """Write weights, configuration, tokenizer and step, in files of the names that Hugging Face gives them.

    `model.safetensors`, `config.json`, `tokenizer_config.json`, `tokenizer.json` unless the tokens are bytes, and
    `trainer_state.json` with `global_step`.

    Args:
        model: The model itself, without wrappers.
        tokenizer: Of the training data.
        folder: Made if it does not exist (its parent must); files of the same names are replaced.
        step: Optimizer steps done.

    Raises:
        OSError: If a file cannot be written; without `trainer_state.json`, the files may be of different steps.
    """
    folder.mkdir(exist_ok=True)
    (folder / STEP_FILE).unlink(missing_ok=True)
    tokenizer.save(folder)
    save_weights(model, folder)
    write_whole(folder / STEP_FILE, json.dumps({"global_step": step}) + "\n")
