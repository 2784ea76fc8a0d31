"""`trifocal evaluate` on a GPU: the loss of the trainer, and answers that do not depend on the rows beside them."""

import math

import pytest
import torch

from trifocal.data import DataConfig, make_tokenizer, read_validation
from trifocal.evaluation import Subject
from trifocal.evaluation.needles import measure_needles
from trifocal.evaluation.position_loss import measure_loss
from trifocal.models import DecoderLM, ModelConfig
from trifocal.train.validation_loss import evaluate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
TOKENIZER = make_tokenizer("bytes")


def subject(source: str, **changes: object) -> Subject:
    sizes = {"dim": 256, "num_heads": 4, "num_kv_heads": 1, "head_dim": 64, "value_dim": 64, "mlp_dim": 512}
    model = DecoderLM(ModelConfig(num_layers=2, **(sizes | changes)))  # type: ignore[arg-type]
    model.init_weights(0)
    return Subject(model.to(CUDA), TOKENIZER, DataConfig(source=source), None, CUDA, "bf16")


@pytest.mark.parametrize(
    "changes", [{}, {"attention": "dense"}, {"attention": "window"}, {"selection": "random"}], ids=str
)
@pytest.mark.parametrize("source", ["builtin", "needle:4"])
def test_the_loss_is_that_of_the_trainer(source: str, changes: dict[str, object]) -> None:
    """In packed rows of 4,096 tokens; both round to bf16, and add in another order."""
    model = subject(source, **changes)
    assert model.data is not None
    batches = read_validation(
        model.data, tokenizer=TOKENIZER, vocab_size=257, sequence_length=4096, sequences=4, at_once=2
    )
    whole, *positions = measure_loss(model, batches, lambda done: None)
    known = evaluate(model.model, batches, tokenizer=TOKENIZER, data=model.data, device=CUDA, precision="bf16")
    assert whole["loss"] == pytest.approx(known.validation_loss, rel=1e-3)
    assert sum(row["targets"] for row in positions) == whole["targets"]
    total = sum(row["targets"] * row["loss"] for row in positions)
    assert total == pytest.approx(whole["targets"] * whole["loss"], rel=1e-9)


def test_long_haystacks_fit_and_are_guessed_before_training() -> None:
    """65,536 tokens in one pass; an untrained model knows nothing of the half of the vocabulary that answers."""
    rows = list(measure_needles(subject("needle:4"), 65536, (0.0, 1.0), 2))
    assert [row["accuracy"] for row in rows] == [0.0, 0.0]
    assert all(math.log(128) - 1 < row["answer_loss"] < math.log(257) + 2 for row in rows)
