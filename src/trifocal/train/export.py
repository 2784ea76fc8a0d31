"""What it takes to use a trained model: its weights and configuration, and its tokenizer."""

from pathlib import Path

from trifocal.data import Tokenizer
from trifocal.models import DecoderLM, save_weights


def export_weights(model: DecoderLM, tokenizer: Tokenizer, folder: Path, *, step: int) -> None:
    """Write `model.safetensors`, `config.json`, `tokenizer_config.json` and, unless it is bytes, `tokenizer.json`.

    Args:
        model: The model itself, without wrappers.
        tokenizer: Of the text that it was trained on.
        folder: Made if it does not exist, in one that does; files of the same names are replaced.
        step: Optimizer steps done; it stands in the metadata of `model.safetensors`.

    Raises:
        OSError: If the disk does not take them.
    """
    folder.mkdir(exist_ok=True)
    tokenizer.save(folder)
    save_weights(model, folder, step=step)
