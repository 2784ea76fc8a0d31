"""A GGUF as a folder of Hugging Face: transformers takes its weights out of their quantisation."""

import importlib.util
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trifocal.errors import UserError, one_line
from trifocal.models.io import CONFIG_FILE, WEIGHTS_FILE, write_tensors


def write_folder_of_gguf(file: Path, folder: Path) -> None:
    """Write `config.json`, weights in fp32 and the tokenizer into a folder that exists. UserError if a package is
    missing, or transformers cannot read the file: an architecture or quantisation that it does not know, for example.
    """
    # transformers reads it with both.
    if missing := [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]:
        raise UserError(f"{file}: a GGUF needs more packages: pip install {' '.join(missing)}")
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    except Exception as error:  # Its readers raise many kinds of errors.
        raise UserError(f"{file}: transformers cannot read this GGUF: {one_line(error)}") from error
    # Its own save_pretrained refuses weights that were quantised once.
    tensors = model.state_dict()
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    config = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    write_tensors(folder / WEIGHTS_FILE, tensors, {"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, default=str) + "\n", encoding="utf-8")
