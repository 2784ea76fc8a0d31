"""`benchmarks/decoding.py` on a GPU: every part has its rows, and the recorded plain model is the eager one."""

import pytest
import torch

from lib.decode_engine import DecodeOptions
from lib.plain_decoder import PlainDecoder
from lib.recorder import Recorder
from lib.timing import recorded
from tests.children import load_script
from tests.devices import NEEDS_GPU
from trifocal.models import DecoderLM, ModelConfig

pytestmark = [
    *NEEDS_GPU,
    # PyTorch's compiler warns when it is first imported, here for the plain model.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]

SIZES = {"dim": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 256}


def test_every_part_has_its_rows():
    options = DecodeOptions(
        sizes=("1x1024", "4x300"), new_tokens=8, prompt_tokens=(3000,), prefill_chunk_size=1024, compile=False,
        layer_sizes=("2x2000",), requests=12, mix_in=(100, 300), mix_out=(5, 20), max_sequences=8, repeats=2,
        row_seconds=0.05, model=ModelConfig(**SIZES),
    )  # fmt: skip
    recorder = Recorder(600, print, lambda: None)
    load_script("benchmarks/decoding.py").bench_decode(options, recorder)
    assert {row["status"] for row in recorder.rows} == {"ok"}, recorder.rows
    assert [row["part"] for row in recorder.rows] == ["model"] * 6 + ["prefill"] * 2 + ["layer"] * 2 + ["mix"] * 2
    assert all(row["peak_gib"] > 0 for row in recorder.rows if row["part"] != "layer")


@pytest.mark.filterwarnings("ignore")
def test_the_recorded_plain_model_is_the_eager_one():
    torch.manual_seed(0)
    model = DecoderLM(ModelConfig(**SIZES, attention="dense")).cuda()
    plain = PlainDecoder(model, 3, 500, torch.float32)
    step = recorded(torch.compile(plain.step, fullgraph=True, dynamic=False), torch.device("cuda"))
    for _ in range(3):
        expected = plain.logits(plain.tokens[:, None])[:, 0].argmax(-1)
        step()
        assert torch.equal(plain.tokens, expected)
