"""A dense model of transformers, made sparse and read by transformers again, gives the same logits."""

from pathlib import Path

import pytest
import torch
import transformers

import trifocal.hf  # noqa: F401 (transformers knows our models then)
from tests.models.test_conversion import CASES, LENGTH, logits, theirs
from trifocal.cli import main
from trifocal.data import make_tokenizer

COVERING = ["--geometry.compression-block-size", "4", "--geometry.compression-stride", "2"]
COVERING += ["--geometry.selection-block-size", "8", "--geometry.num-selected-blocks", "6"]


@pytest.mark.parametrize(
    "case", ["llama, biases, tied", "llama, llama3", "qwen3", "olmo2, biases, tied, sliding ignored"]
)
def test_logits_after_conversion_and_export(tmp_path: Path, case: str) -> None:
    kind, changes = CASES[case]
    dense, sparse, exported = (tmp_path / name for name in ("dense", "sparse", "exported"))
    # Room for the tokens of bytes.
    model = theirs(kind, dense, **changes, vocab_size=260)
    assert main(["convert", str(dense), str(sparse), "--to", "selected", "--dense-layers", "1", *COVERING]) == 0
    make_tokenizer("bytes").save(sparse)
    assert main(["export", str(sparse), str(exported)]) == 0
    tokens = torch.randint(260, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    expected = logits(model, tokens)
    for folder in (sparse, exported):
        again = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert again.config.model["layer_types"] == ["selected", "dense", "selected"]
        assert again.config.max_position_embeddings == model.config.max_position_embeddings
        found = logits(again, tokens)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * expected.abs().max().item())
