"""lm-eval asks the server, and gets the figures of the model in this process."""

import pytest
import torch

pytest.importorskip("lm_eval")
pytest.importorskip("transformers")

from tests.hf.test_lm_eval import TOKENIZER, check_figures
from tests.serve.servers import serving
from trifocal.testing.small_models import make_model, small_config

# datasets' and lm-eval's own.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def test_figures_are_those_in_process(tmp_path):
    # In float64: see tests/hf/test_lm_eval.py.
    decoder = make_model(small_config(vocab_size=257), torch.device("cpu"), torch.float64).eval()
    TOKENIZER.save(tmp_path)
    with serving(decoder) as served:
        arguments = f"model=tiny,base_url={served.url}/v1/completions,tokenizer={tmp_path},max_length=96"
        check_figures(decoder, tmp_path, "local-completions", f"{arguments},tokenizer_backend=huggingface")
