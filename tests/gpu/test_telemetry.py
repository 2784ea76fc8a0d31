"""Telemetry on a GPU: the same figures as the reference's, and no wait for the device before they are read."""

import pytest
import torch

from trifocal import Geometry
from trifocal.models import DecoderLM, ModelConfig
from trifocal.telemetry import AttentionTelemetry

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTH = 2048


def make_telemetry(backend):
    sizes = {"dim": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "value_dim": 64, "mlp_dim": 512}
    config = ModelConfig(vocab_size=257, num_layers=2, geometry=Geometry(), backend=backend, **sizes)
    model = DecoderLM(config).cuda()
    model.init_weights(0)
    return AttentionTelemetry(model)


def draw_tokens():
    return torch.randint(257, (2, LENGTH), generator=torch.Generator().manual_seed(0)).cuda()


# PyTorch warns that this mode of it is a prototype.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("borders", [None, [0, 700, 3000, 2 * LENGTH]])
def test_no_figure_makes_the_host_wait(borders):
    telemetry, tokens = make_telemetry("triton"), draw_tokens()
    cu_seqlens = None if borders is None else torch.tensor(borders)
    with torch.autocast("cuda", torch.bfloat16):
        # The first call compiles kernels and fills caches.
        telemetry.figures(tokens, cu_seqlens=cu_seqlens)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            figures = telemetry.figures(tokens, cu_seqlens=cu_seqlens)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(value.is_cuda for value in figures.values())


def test_kernels_and_reference_give_the_same_figures():
    tokens = draw_tokens()
    for mine, other in zip(
        make_telemetry("triton").measure(tokens), make_telemetry("reference").measure(tokens), strict=True
    ):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            # Two blocks of equal importance may change places.
            assert value == pytest.approx(other[name], abs=0.02), name


def test_a_picture_of_the_kernels_choice():
    tokens = draw_tokens()
    picture = make_telemetry("triton").picture(1, tokens, ["x"] * LENGTH)
    blocks = LENGTH // 64
    assert picture.importance.shape == (2, 128, 2, blocks)
    total = ((picture.dense / 255.0) ** 2).sum(-1)
    assert abs(total - 1).max() < 0.1
    assert (picture.selected[:, -1].max(-1) == blocks - 1).all()
