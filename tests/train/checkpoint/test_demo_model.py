"""The model that comes with the package."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import trifocal
from trifocal.train import load_config
from trifocal.train.checkpoint.pretrained import DEMO_FOLDER


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A folder without a file named demo."""
    monkeypatch.chdir(tmp_path)


def test_it_is_small_and_of_its_preset():
    assert sum(path.stat().st_size for path in DEMO_FOLDER.iterdir()) < 8e6
    assert not list(DEMO_FOLDER.glob("*.py")), "code here would be a package of Python's"
    assert {x.dtype for x in load_file(DEMO_FOLDER / "model.safetensors").values()} == {torch.bfloat16}
    assert trifocal.load_model("demo").config == load_config("python").model
    assert "auto_map" not in json.loads((DEMO_FOLDER / "config.json").read_text())
    text = (DEMO_FOLDER / "README.md").read_text(encoding="utf-8")
    assert "\ntrifocal train python" in text and "PSF License Agreement" in text


def test_it_has_learned_the_standard_library():
    """Fewer than 1 nat a byte, where a byte's frequency gives 3; the file is text of its training."""
    model, tokenizer = trifocal.load_model("demo").float(), trifocal.load_tokenizer("demo")
    text = Path(argparse.__file__).read_text(encoding="utf-8")
    tokens = torch.from_numpy(tokenizer.encode(text)[:1024]).long()[None]
    with torch.no_grad():
        logits = model(tokens)
    loss = torch.nn.functional.cross_entropy(logits[0, :-1].float(), tokens[0, 1:]).item()
    assert loss < 1, loss


def test_it_writes_python():
    text = trifocal.generate("demo", "import os\n\n\ndef main(", 64, temperature=0, device="cpu")
    assert text.isascii() and "):\n    " in text, text
