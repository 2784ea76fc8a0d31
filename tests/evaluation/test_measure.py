"""What is measured, against models whose answers are known: one that copies, and one that copies only from near."""

import itertools
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.devices import WIDE, needs_gpu
from tests.train.tiny import make_config
from tests.written_runs import Clock
from trifocal.data import DataConfig, make_tokenizer
from trifocal.data.loader import read_validation
from trifocal.errors import UserError
from trifocal.evaluation import measure, subject
from trifocal.evaluation.measure import Plan, TimeLeft, evaluate_model, not_possible, planned_tokens, rows_name
from trifocal.evaluation.needles import Haystacks, measure_needles
from trifocal.evaluation.position_loss import PositionLosses, measure_loss, position_edges
from trifocal.evaluation.recall import _distances, measure_recall
from trifocal.evaluation.subject import Subject
from trifocal.models import DecoderLM, ModelConfig
from trifocal.ops import Documents
from trifocal.testing.small_models import small_config
from trifocal.train.validation_loss import evaluate, read_validation_batches

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TOKENIZER = make_tokenizer("bytes")
SMALL_MODEL = small_config()


class Copier:
    """Predicts what followed the longest earlier match of the last tokens, as far back as it sees."""

    def __init__(self, vocab_size, sees=10**9):
        self.config = SimpleNamespace(vocab_size=vocab_size, attention_of_layers=("dense",))
        self._sees = sees

    def hidden_states(self, tokens):
        """The predicted token of each position, [B, T, 1]."""
        return torch.tensor([[[self._guess(row[: end + 1])] for end in range(len(row))] for row in tokens.tolist()])

    def logits(self, hidden):
        """All on the predicted token."""
        return 9.0 * torch.nn.functional.one_hot(hidden[..., 0], self.config.vocab_size)

    def _guess(self, past):
        best, guess = 0, 0
        for at in range(max(0, len(past) - 1 - self._sees), len(past) - 1):
            match = 0
            while match < min(at + 1, 14) and past[at - match] == past[-1 - match]:
                match += 1
            if match and match >= best:
                best, guess = match, past[at + 1]
        return guess


def copying(source, sees=10**9):
    return Subject(Copier(257, sees), TOKENIZER, DataConfig(source=source), None, CPU, "fp32")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return make_config(tmp_path_factory.mktemp("text")).data.source


@pytest.mark.parametrize("source", ["text", "needle", "needle:3"])
def test_a_model_that_copies_finds_every_needle(source, text):
    model = copying(text if source == "text" else source)
    rows = list(measure_needles(model, 160, (0.0, 0.3, 1.0), 2))
    assert [row["depth"] for row in rows] == [0.0, 0.3, 1.0]
    assert all(row["needles"] == (3 if source == "needle:3" else 1) for row in rows)
    assert all(row["accuracy"] == 1.0 and row["answer_loss"] < 0.1 for row in rows)


@pytest.mark.parametrize("source", ["text", "needle"])
def test_a_model_that_sees_the_near_past_finds_only_late_needles(source, text):
    """The needle and the question are 31 bytes each in text, 6 tokens each in the task."""
    model = copying(text if source == "text" else source, sees=88)
    rows = {row["depth"]: row for row in measure_needles(model, 160, (0.0, 0.25, 1.0), 2)}
    assert [rows[depth]["accuracy"] for depth in (0.0, 0.25, 1.0)] == [0.0, 0.0, 1.0]
    assert rows[0.0]["answer_loss"] > 3 > rows[1.0]["answer_loss"]


def test_needles_of_different_lengths_count_apart(monkeypatch):
    """Answers of one, three and two tokens, in one batch: of two the first token is another, the last is found."""
    prompts = [
        (np.array([5, 6, 0, 5]), np.array([-100] * 3 + [9])),
        (np.array([5, 6, 7, 8, 0, 5, 6, 7]), np.array([-100] * 5 + [9, 7, 8])),
        (np.array([5, 6, 7, 0, 5, 6]), np.array([-100] * 4 + [6, 7])),
    ]
    monkeypatch.setattr(Haystacks, "prompts", lambda *_: [(0.5, prompts)])
    [row] = measure_needles(copying("needle"), 8, (0.5,), 3)
    # A token that is found costs 0.03 nats, another one 9.03.
    assert row["accuracy"] == 1 / 3 and row["answer_loss"] == pytest.approx((2 * 9.03 + 4 * 0.03) / 6, abs=0.01)


@pytest.mark.parametrize("source", ["text", "needle"])
def test_needles_of_a_depth_lie_in_a_block_in_many_ways(source, text):
    haystacks = Haystacks(copying(text if source == "text" else source))
    for depth, prompts in haystacks.prompts(2048, (0.0, 0.5, 1.0), 16):
        places = []
        for tokens, targets in prompts:
            # The task's question repeats mark and key; a text's is its last 20 bytes.
            first = int(np.flatnonzero(targets >= 0)[0])
            question = tokens[first - 1 : first + 1] if haystacks.is_task else tokens[first - 19 : first + 1]
            found = np.lib.stride_tricks.sliding_window_view(tokens, len(question))
            places.append(int((found == question).all(1).nonzero()[0][0]))
        assert len({place % 64 for place in places}) > 8
        assert all(abs(place - depth * 2048) < 200 for place in places)


def test_recall_by_distance_shows_where_a_window_ends():
    whole = list(measure_recall(copying("recall"), 256, 16, 3))
    assert all(row["accuracy"] == 1.0 for row in whole)
    assert (whole[0]["task"], whole[0]["pairs"], whole[0]["samples"]) == ("recall", 16, 3)
    assert sum(row["queries"] for row in whole[1:]) == 3 * 16
    near = {row.get("first"): row["accuracy"] for row in measure_recall(copying("recall", sees=63), 256, 16, 3)}
    assert near[0] == 1.0 and near[64] < 0.2 and near[128] < 0.2
    # Two pairs of a key and its value, a gap, and both keys again.
    tokens, targets = np.array([5, 9, 6, 8, 0, 6, 5]), np.array([-100] * 5 + [8, 9])
    assert _distances(tokens, targets, 2).tolist() == [3, 6]


def rows_of(batches):
    return torch.cat([batch.tokens for batch in batches])


def test_settings_of_training_do_not_decide_which_sequences_are_evaluated(tmp_path):
    """Nor does a batch have more than a step; one takes the largest number that divides the sequences."""
    text = make_config(tmp_path).data.source
    shapes, rows = [], []
    for changes in (
        ("--train.micro_batch_size", "64", "--train.global_batch_size", "4"),
        ("--train.micro_batch_size", "2", "--data.shuffle_sequences", "5", "--data.seed", "3"),
        ("--train.micro_batch_size", "1", "--data.shuffle_documents", "2", "--data.streams", "2"),
    ):
        run = make_config(tmp_path, "--data.source", text, "--evaluate.sequences", "6", *changes)
        batches = read_validation_batches(run, TOKENIZER)
        shapes.append([batch.tokens.shape[0] for batch in batches])
        rows.append(rows_of(batches))
    assert shapes == [[3, 3], [2, 2, 2], [1] * 6]
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])
    assert len({tuple(row) for row in rows[0].tolist()}) == 6


def test_weights_and_their_run_are_measured_on_the_same_sequences(tmp_path):
    """At any length; a line says which they are. The choice is measured on some of them, one at a time."""
    run = make_config(tmp_path, "--data.shuffle_sequences", "5")
    model = DecoderLM(run.model)
    model.init_weights(3)
    data = DataConfig(source=run.data.source, validation_fraction=run.data.validation_fraction)
    said = []
    for length, sequences in ((32, 5), (64, 3)):
        plan = Plan(tasks=("loss", "choice"), sequence_length=length, sequences=sequences)
        figures = []
        for own, settings in ((run, run.data), (None, data)):
            measured = Subject(model, TOKENIZER, settings, own, CPU, "fp32")
            assert planned_tokens(measured, plan) == sequences * length
            rows = evaluate_model(measured, plan, lambda text, now="": said.append(text))
            figures.append([(row.get("targets", 0), row.get("loss", 0.0), row.get("recall", 0.0)) for row in rows])
        assert figures[0][0][0] > 0
        for one, other in zip(*figures, strict=True):
            assert one == pytest.approx(other, rel=1e-6)
        sizes = {"sequence_length": length, "sequences": sequences, "at_once": 9, "vocab_size": 257}
        name = rows_name(read_validation(data, tokenizer=TOKENIZER, **sizes))
        line = f"loss: {sequences} sequences of {length} tokens of {data.source}, 0.3 of it held out, rows {name}"
        assert said.count(line) >= 2
    list(
        evaluate_model(
            measured, Plan(tasks=("loss",), sequence_length=64, sequences=400), lambda *text: said.append(text[0])
        )
    )
    assert re.search(r"0.3 of it held out, read \d+ times, rows", said[-1])


@torch.no_grad()
def test_a_model_is_compared_with_the_one_beside_it(tmp_path):
    """Against both models' whole logits, by position."""
    config = make_config(tmp_path)
    dense, sparse = (DecoderLM(small_config(attention=kind, vocab_size=257)) for kind in ("dense", "selected"))
    dense.init_weights(0)
    sparse.load_state_dict(dense.state_dict())
    for parameter in sparse.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    data = DataConfig(source=config.data.source, validation_fraction=0.3)
    plan = Plan(tasks=("loss", "position"), sequence_length=40, sequences=4)
    measured = Subject(sparse, TOKENIZER, data, None, CPU, "fp32", beside=dense)
    whole, *parts = evaluate_model(measured, plan, lambda text, now="": None)
    batches = read_validation(data, tokenizer=TOKENIZER, sequence_length=40, sequences=4, at_once=1, vocab_size=257)
    sums = torch.zeros(4)
    for batch in batches:
        documents = None if batch.cu_seqlens is None else Documents.from_cu_seqlens(batch.cu_seqlens, 40)
        log_q, log_p = (model(batch.tokens, cu_seqlens=documents).log_softmax(-1)[0] for model in (sparse, dense))
        for q, p, target in zip(log_q, log_p, batch.targets[0].tolist(), strict=True):
            if target >= 0:
                sums += torch.stack(
                    (-q[target], -p[target], (p.exp() * (p - q)).sum(), (q.argmax() == p.argmax()).float())
                )
    expected = (sums / whole["targets"]).tolist()
    names = ("loss", "beside_loss", "divergence", "agreement")
    assert [whole[name] for name in names] == pytest.approx(expected, rel=1e-5)
    for name in names:
        assert sum(part[name] * part["targets"] for part in parts) / whole["targets"] == pytest.approx(whole[name])
    assert whole["divergence"] > 0 and 0 < whole["agreement"] < 1


def test_losses_are_those_of_training_and_add_up_by_position(tmp_path):
    """Packed rows, so a position is counted from its document's beginning."""
    run = make_config(tmp_path, "--evaluate.sequences", "12")
    model = DecoderLM(run.model)
    model.init_weights(3)
    batches = read_validation_batches(run, TOKENIZER)
    assert len({batch.valid_targets for batch in batches}) > 1, "equal weights would not tell a mean of means apart"
    whole, *positions = measure_loss(Subject(model, TOKENIZER, run.data, run, CPU, "fp32"), batches, lambda done: None)
    done = []
    settings = {"tokenizer": TOKENIZER, "data": run.data, "device": CPU, "precision": "fp32"}
    expected = evaluate(model, batches, **settings, on_batch=done.append)
    assert done == list(range(1, len(batches) + 1))
    assert whole["loss"] == pytest.approx(expected.validation_loss, rel=1e-6)
    assert whole["bits_per_byte"] == pytest.approx(expected.bits_per_byte, rel=1e-6)
    assert whole["bits_per_token"] == pytest.approx(whole["loss"] / math.log(2))
    # By hand, document by document.
    sums = {}
    for batch in batches:
        borders = (batch.cu_seqlens if batch.cu_seqlens is not None else torch.tensor([0, 32, 64])).tolist()
        for start, end in itertools.pairwise(borders):
            log_p = model(batch.tokens.flatten()[None, start:end]).log_softmax(-1)[0]
            for place, target in enumerate(batch.targets.flatten()[start:end].tolist()):
                if target >= 0:
                    sums.setdefault(0 if place < 8 else 8 if place < 16 else 16, []).append(
                        -log_p[place, target].item()
                    )
    assert [(row["first"], row["targets"]) for row in positions] == [(at, len(sums[at])) for at in (0, 8, 16)]
    for row in positions:
        assert row["loss"] == pytest.approx(sum(sums[row["first"]]) / row["targets"], rel=1e-5)


@pytest.mark.parametrize("exact", [False, True])
def test_recall_of_the_choice_is_by_layer_and_by_distance(text, exact):
    changes = {"selection": "exact"} if exact else {"chooser": "index"}
    model = DecoderLM(small_config(num_layers=3, layer_types=("nsa", "dense", "selected"), vocab_size=257, **changes))
    model.init_weights(3)
    data = DataConfig(source=text, validation_fraction=0.3)
    subject = Subject(model, TOKENIZER, data, None, CPU, "fp32")
    plan = Plan(tasks=("choice",), sequence_length=256, sequences=4)
    rows = list(evaluate_model(subject, plan, lambda line, detail="": None))
    layers, distances = ([row for row in rows if row["task"] == task] for task in ("choice", "choice_distance"))
    assert [row["layer"] for row in layers] == [0, 2] and distances
    assert sum(row["exact_mass"] for row in distances) == pytest.approx(1, abs=1e-4)
    recall = sum(row["recall"] for row in layers) / 2
    assert sum(row["exact_mass"] * row["recall"] for row in distances) == pytest.approx(recall, abs=1e-4)
    assert (recall == pytest.approx(1, abs=1e-4)) == exact
    assert all(row["end"] == 2 * row["first"] for row in distances)
    (row,) = evaluate_model(subject, replace(plan, sequence_length=16), lambda line, detail="": None)
    assert row["status"] == "not run: no query of 16 tokens has more free blocks than it chooses"


def test_logits_of_large_vocabularies_are_made_in_parts(monkeypatch):
    model = DecoderLM(SMALL_MODEL)
    tokens = torch.randint(SMALL_MODEL.vocab_size, (2, 17))
    whole, parts = (PositionLosses(model, position_edges(16), CPU) for _ in range(2))
    with torch.no_grad():
        loss = whole(tokens[:, :-1], tokens[:, 1:])
        monkeypatch.setattr("trifocal.evaluation.position_loss._LOGITS_AT_ONCE", 5 * SMALL_MODEL.vocab_size)
        assert parts(tokens[:, :-1], tokens[:, 1:]) == pytest.approx(loss.item(), rel=1e-6)
        assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(loss.item(), rel=1e-6)
    assert torch.equal(whole.counts, parts.counts) and whole.counts.tolist() == [16, 16]


@pytest.mark.parametrize(("length", "batches", "rows"), [(32, 2, 2), (64, 2, 1), (16, 2, 4), (128, 1, 1), (256, 1, 1)])
def test_other_lengths_read_as_many_tokens(tmp_path, monkeypatch, length, batches, rows):
    run = make_config(tmp_path)
    found = []
    monkeypatch.setattr(
        measure, "measure_loss", lambda subject, batches, on_batch: found.extend(b.tokens.shape for b in batches) or []
    )
    subject = Subject(DecoderLM(run.model), TOKENIZER, run.data, run, CPU, "fp32")
    list(evaluate_model(subject, Plan(tasks=("loss",), sequence_length=length), lambda text, now="": None))
    assert found == [(rows, length)] * batches


def test_what_makes_no_sense_or_does_not_fit_is_said(monkeypatch, text):
    dense = small_config(attention="dense")
    for task, source, config, reason in (
        ("recall", "builtin", dense, 'data.source "builtin" has no keys and values to recall'),
        ("needle", "recall:8", dense, 'data.source "recall:8" has neither text nor needles'),
        ("loss", "", dense, "the data of its training are not known; name some with --source"),
        ("choice", "builtin", dense, "no layer chooses blocks"),
        ("choice", "builtin", small_config(selection="random"), "no layer chooses blocks"),
        ("choice", "builtin", SMALL_MODEL, ""),
        ("position", "builtin", dense, ""),
        ("needle", "needle:2", dense, ""),
        ("needle", "text:a", dense, ""),
        ("recall", "recall:8", dense, ""),
    ):
        assert not_possible(task, DataConfig(source=source) if source else None, config) == reason

    said = []
    plan = Plan(tasks=("needle",), sequence_length=64, lengths=(40, 100), depths=1, samples=1)
    rows = list(evaluate_model(copying(text), plan, lambda line, detail="": said.append(line)))
    assert [row["status"] for row in rows] == ["not run: a needle and its question need 64 tokens, got 40", "ok"]
    assert [line.partition(", about")[0] for line in said if "1 haystacks" in line] == [
        *("needle: 1 haystacks of 40 tokens",) * 2,
        *("needle: 1 haystacks of 100 tokens",) * 2,
    ]
    sparse = Subject(DecoderLM(SMALL_MODEL), TOKENIZER, DataConfig(source="recall"), None, CPU, "fp32")
    monkeypatch.setattr(subject, "host_memory_bytes", lambda: 2**20)
    plan = Plan(tasks=("loss",), sequence_length=4096)
    (row,) = evaluate_model(sparse, plan, lambda line, detail="": None)
    assert row["status"].startswith("not run: the reference backend needs ")
    assert copying("needle").lacks_memory(10**6) == ""
    plan = replace(plan, tasks=("loss", "needle"))
    with pytest.raises(UserError, match=r"needle: 64 needles need a model\.vocab_size of 641, got 257"):
        list(evaluate_model(copying("needle:64"), plan, lambda line, detail="": None))


def test_the_time_left_goes_by_the_tokens_of_the_plan():
    clock = Clock()
    subject = copying("recall:8")
    plan = Plan(tasks=("loss", "needle", "recall"), sequence_length=512, sequences=3, depths=2, samples=4)
    tokens = planned_tokens(subject, plan)
    assert tokens == 3 * 512 + 2 * 4 * (64 + 128 + 256 + 512) + 3 * 4 * 512
    left = TimeLeft(tokens, clock)
    assert left.words() == ""
    left.add(tokens // 4)
    clock.pass_seconds(20.0)
    assert left.words() == ", about 1:00 left"


def gpu_subject(source, **changes):
    model = DecoderLM(ModelConfig(num_layers=2, **(WIDE | {"num_kv_heads": 1} | changes)))
    model.init_weights(0)
    return Subject(model.to(GPU), TOKENIZER, DataConfig(source=source), None, GPU, "bf16")


@needs_gpu
@pytest.mark.parametrize(
    "changes", [{}, {"attention": "dense"}, {"attention": "window"}, {"selection": "random"}], ids=str
)
@pytest.mark.parametrize("source", ["builtin", "needle:4"])
def test_the_loss_is_that_of_the_trainer(source, changes):
    """In packed rows of 4,096 tokens; both round to bf16, and add in another order."""
    model = gpu_subject(source, **changes)
    batches = read_validation(
        model.data, tokenizer=TOKENIZER, vocab_size=257, sequence_length=4096, sequences=4, at_once=2
    )
    whole, *positions = measure_loss(model, batches, lambda done: None)
    known = evaluate(model.model, batches, tokenizer=TOKENIZER, data=model.data, device=GPU, precision="bf16")
    assert whole["loss"] == pytest.approx(known.validation_loss, rel=1e-3)
    assert sum(row["targets"] for row in positions) == whole["targets"]
    total = sum(row["targets"] * row["loss"] for row in positions)
    assert total == pytest.approx(whole["targets"] * whole["loss"], rel=1e-9)


@needs_gpu
def test_long_haystacks_fit_and_are_guessed_before_training():
    """65,536 tokens in one pass; an untrained model knows nothing of the half of the vocabulary that answers."""
    rows = list(measure_needles(gpu_subject("needle:4"), 65536, (0.0, 1.0), 2))
    assert [row["accuracy"] for row in rows] == [0.0, 0.0]
    assert all(math.log(128) - 1 < row["answer_loss"] < math.log(257) + 2 for row in rows)
