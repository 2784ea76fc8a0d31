"""Each trace on a real small run: its figures are right, and no other step has any."""

import csv
import gzip
import json
import pickle
from collections import Counter

import pytest
import torch

from tests.devices import needs_gpu
from tests.train.tiny import before_step, make_config, read_checkpoint
from trifocal.models import DecoderLM
from trifocal.nn.block import SwiGLU
from trifocal.runlog import read_metrics
from trifocal.runlog.traces.base import ModuleHooks
from trifocal.runlog.traces.tracer import TRACES
from trifocal.train import train

QUICK = ("--evaluate.interval_steps", "0", "--log.telemetry_interval_steps", "0", "--checkpoint.interval_steps", "0")
# Forward passes between the steps, which are none of a trace's business.
BUSY = ("--evaluate.interval_steps", "1", "--evaluate.sequences", "2", "--log.telemetry_interval_steps", "1")


def traced(folder, what, *flags, steps="2:4"):
    """A run with traces of its steps 2 and 3; the folder of the first window."""
    config = make_config(folder, "--trace.what", what, "--trace.steps", steps, *QUICK, *flags)
    assert train(config).finished
    return folder / "run" / "traces" / "steps_2-3"


def table(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def expected_model(folder, *flags):
    return DecoderLM(make_config(folder, *flags, name="other").model)


def test_gradients_arrive_once_a_micro_batch_and_the_last_layers_first(tmp_path):
    folder = traced(tmp_path, "gradients")
    rows = table(folder / "gradients_rank0.csv")
    names = [name for name, _ in expected_model(tmp_path).named_parameters()]
    # Two steps of two micro-batches; each micro-batch may be cut into rows with and without borders, added up in one.
    for step in ("2", "3"):
        for micro_batch in ("1", "2"):
            mine = [row for row in rows if (row["step"], row["micro_batch"]) == (step, micro_batch)]
            assert Counter(row["parameter"] for row in mine) == Counter(names)
            assert [int(row["order"]) for row in mine] == list(range(1, len(names) + 1))
            times = [float(row["host_milliseconds"]) for row in mine]
            assert times == sorted(times) and times[0] >= 0
            order = [row["parameter"] for row in mine]
            assert order.index("head.weight") < order.index("blocks.1.mlp.down_proj.weight")
            assert order.index("blocks.1.mlp.down_proj.weight") < order.index("blocks.0.mlp.down_proj.weight")
            assert order[-1] == "embedding.weight"
    assert len(rows) == 4 * len(names)


def test_a_parameter_without_a_gradient_is_listed(tmp_path, monkeypatch):
    """A module of a step that is not called in it."""
    original = SwiGLU.forward
    now = [0]
    before_step(monkeypatch, lambda step, arguments: now.__setitem__(0, step))

    def skips(self, x):
        return x if now[0] == 3 else original(self, x)

    monkeypatch.setattr(SwiGLU, "forward", skips)
    rows = table(traced(tmp_path, "gradients") / "gradients_rank0.csv")
    expected = {name for name, _ in expected_model(tmp_path).named_parameters() if ".mlp." in name and "_proj" in name}
    missing = [row for row in rows if row["remark"]]
    assert {row["parameter"] for row in missing} == expected and len(missing) == len(expected)
    assert {(row["step"], row["order"], row["remark"]) for row in missing} == {("3", "", "no gradient in this step")}


def test_modules_run_forward_in_order_backward_in_reverse_and_again_when_checkpointed(tmp_path):
    flags = ("--train.activation_checkpointing", "0:1", "--data.source", "synthetic", "--train.micro_batch_size", "4")
    rows = table(traced(tmp_path, "modules", *flags, *BUSY) / "modules_rank0.csv")
    assert {row["step"] for row in rows} == {"2", "3"} and {row["micro_batch"] for row in rows} == {"1"}
    names = [name or "model" for name, _ in expected_model(tmp_path).named_modules()]

    def order(event, step="2"):
        return [row["module"] for row in rows if (row["event"], row["step"]) == (event, step)]

    # A row stands where a module ends: the model itself comes last, and of the blocks the parts come before the whole.
    forward = order("forward")
    assert set(forward) <= set(names) and forward[0] == "embedding" and forward[-1] == "model"
    blocks = [name for name in forward if name in ("blocks.0", "blocks.1", "norm")]
    assert blocks == ["blocks.0", "blocks.1", "norm"]
    # Only the first layer is computed again, in backward.
    assert order("recompute") and all(name.startswith("blocks.0") for name in order("recompute"))
    backward = [name for name in order("backward") if name in ("blocks.0", "blocks.1", "norm", "model", "embedding")]
    assert backward == ["model", "norm", "blocks.1", "blocks.0", "embedding"]
    for row in rows:
        assert float(row["host_begin_milliseconds"]) >= 0
        if row["event"] != "backward":
            assert float(row["host_milliseconds"]) >= 0
    whole = next(row for row in rows if row["module"] == "model" and row["event"] == "forward")
    part = next(row for row in rows if row["module"] == "blocks.0" and row["event"] == "forward")
    assert float(part["host_milliseconds"]) < float(whole["host_milliseconds"])


def test_the_audit_of_types_sees_fp32_weights_and_bf16_activations(tmp_path, monkeypatch):
    # PyTorch computes bf16 on any CPU; without its instructions, only slowly.
    monkeypatch.setattr("trifocal.train.config.check.computes_bf16", lambda _: True)
    rows = table(traced(tmp_path, "dtypes", "--train.precision", "bf16", *BUSY) / "dtypes_rank0.csv")
    found = {kind: Counter(row["dtype"] for row in rows if row["kind"] == kind) for kind in {r["kind"] for r in rows}}
    parameters = len(list(expected_model(tmp_path).parameters()))
    assert found["parameter"] == found["gradient"] == {"float32": parameters}
    assert found["optimizer state"] == {"float32": 3 * parameters}
    assert found["activation"]["bfloat16"] > 10 and found["activation"]["float32"] >= 1
    assert found["gradient of activation"]["bfloat16"] > 10
    by_name = {(row["kind"], row["name"]): row for row in rows}
    assert by_name["activation", "blocks.0.mlp.down_proj"]["dtype"] == "bfloat16"
    assert by_name["activation", "embedding"]["dtype"] == "float32"
    assert by_name["parameter", "blocks.0.mlp.up_proj.weight"]["shape"] == "32x16"


def test_the_memory_table_adds_up(tmp_path):
    dense = ("--model.attention", "dense")
    flags = ("--data.source", "synthetic", "--train.micro_batch_size", "4", *dense)
    rows = {row.pop("module"): {name: int(value) for name, value in row.items()} for row in table(
        traced(tmp_path, "memory", *flags) / "memory_rank0.csv"
    )}  # fmt: skip
    sizes = [parameter.numel() for parameter in expected_model(tmp_path, *dense).parameters()]
    parameters = 4 * sum(sizes)
    total = rows["total"]
    assert total["parameter_bytes"] == total["gradient_bytes"] == parameters
    # Two moments and a step counter a parameter tensor.
    assert total["optimizer_bytes"] == 2 * parameters + 4 * len(sizes)
    saved = {name: row["saved_for_backward_bytes"] for name, row in rows.items()}
    assert saved["total"] == sum(value for name, value in saved.items() if name != "total")
    # B * T * E of fp32, which the down projection of the SwiGLU keeps: its input, 4 x 32 x 32.
    assert saved["blocks.0.mlp.down_proj"] == 4 * 4 * 32 * 32
    assert rows["blocks.0.mlp.down_proj"]["parameter_bytes"] == 4 * 32 * 16


def test_the_profile_holds_every_phase_and_its_table_the_operations(tmp_path):
    folder = traced(tmp_path, "profiler", "--model.num_layers", "1", "--model.attention", "dense")
    operations = (folder / "operations_rank0.txt").read_text()
    assert "aten::mm" in operations and "Self CPU" in operations
    with gzip.open(folder / "profile_rank0.json.gz", "rt") as file:
        names = Counter(event.get("name") for event in json.load(file)["traceEvents"])
    # Forward and backward of two micro-batches, one update.
    for step in (2, 3):
        assert [names[f"step {step}: {phase}"] for phase in ("forward", "backward", "optimizer")] == [2, 2, 1]
    assert names["step 1: forward"] == names["step 4: forward"] == 0


def hooks_left(model):
    of_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return of_modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def test_nothing_is_installed_but_in_the_traced_steps_and_they_change_nothing(tmp_path, monkeypatch):
    counts = {}
    before_step(monkeypatch, lambda step, arguments: counts.__setitem__(step, hooks_left(arguments["loss_function"])))
    what = ",".join(name for name in TRACES if name not in ("exchange", "profiler"))
    flags = (*BUSY, "--checkpoint.interval_steps", "6")
    train(make_config(tmp_path, *QUICK, *flags, "--trace.what", what, "--trace.steps", "2:4, 5:6", name="traced"))
    assert counts[2] > 0 and counts[3] == counts[2] == counts[5]
    assert counts[1] == counts[4] == counts[6] == 0
    assert sorted(path.name for path in (tmp_path / "traced" / "traces").iterdir()) == ["steps_2-3", "steps_5-5"]
    counts.clear()
    train(make_config(tmp_path, *QUICK, *flags, name="plain"))
    assert set(counts.values()) == {0} and not (tmp_path / "plain" / "traces").exists()
    mine, theirs = (read_checkpoint(tmp_path / run / "checkpoints" / "step_00000006") for run in ("traced", "plain"))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_memory_is_written_down_every_n_steps(tmp_path):
    flags = ("--trace.what", "memory", "--trace.steps", "3:6", "--trace.interval_steps", "2", "--train.steps", "9")
    result = train(make_config(tmp_path, *QUICK, *flags, "--data.source", "synthetic"))
    folders = sorted((tmp_path / "run" / "traces").iterdir())
    # Step 4 is in the window.
    assert [folder.name for folder in folders] == ["steps_2-2", "steps_3-5", "steps_6-6", "steps_8-8"]
    totals = [table(folder / "memory_rank0.csv")[-1] for folder in folders]
    assert all(total == totals[0] and int(total["saved_for_backward_bytes"]) > 0 for total in totals), "it is level"
    assert not any("nothing is traced" in note for note in notes(result))


def test_a_disk_that_does_not_take_the_files_is_said_and_stops_no_run(tmp_path, capsys, monkeypatch):
    """In a window that the run ends in, which is written too."""

    def full(trace, folder, rank):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trifocal.runlog.traces.layers.GradientTrace.write", full)
    train(make_config(tmp_path, *QUICK, "--trace.what", "gradients,memory", "--trace.steps", "5:50"))
    assert "could not be written: [Errno 28] No space left on device; training continues" in capsys.readouterr().out
    names = [row["name"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl", "event")]
    assert names.count("trace_failed") == 1 and "traced" not in names
    assert (tmp_path / "run" / "traces" / "steps_5-6" / "memory_rank0.csv").exists()


def notes(result):
    return [
        row["message"] for row in read_metrics(result.directory / "metrics.jsonl", "event") if row["name"] == "note"
    ]


def test_a_window_that_never_comes_is_said_and_the_backends_that_ran_are_written_down(tmp_path):
    flags = ("--trace.what", "gradients", "--trace.steps", "70:80", "--trace.interval_steps", "20")
    result = train(make_config(tmp_path, *QUICK, *flags))
    expected = (
        'trace.steps "70:80" and trace.interval_steps 20: no step of this run is among them, and nothing is traced'
    )
    assert expected in notes(result)
    rows = json.loads((tmp_path / "run" / "backends.json").read_text())
    attention = next(
        row for row in rows if row["operation"] == "nsa_attention" and row["reason"].startswith("the tens")
    )
    assert (attention["backend"], attention["reason"]) == ("reference", "the tensors are not on a CUDA device")
    assert attention["calls"] > 0


def test_one_process_that_is_to_trace_exchanges_is_told_that_there_are_none(tmp_path):
    result = train(make_config(tmp_path, *QUICK, "--trace.what", "exchange", "--trace.steps", "2:4"))
    assert 'trace.what "exchange" has no effect: there is one process' in notes(result)


def test_hooks_close_what_an_exception_left_open():
    """Checkpointing ends a repeated pass by an exception as soon as it has what it needs."""

    class Raises(torch.nn.Module):
        def forward(self, x):
            raise KeyError("enough")

    stack = []
    model = torch.nn.Sequential(torch.nn.Identity(), Raises())
    hooks = ModuleHooks(model, entered=lambda name, _: stack.append(name), left=lambda name, _: pop(stack, name))
    with pytest.raises(KeyError):
        model(torch.ones(1))
    hooks.remove()
    assert stack == [] and hooks_left(model) == 0


def pop(stack, name):
    assert stack.pop() == name


ON_A_GPU = ("--run.device", "cuda")


@needs_gpu
def test_times_of_the_device_and_the_allocators_history(tmp_path):
    folder = traced(tmp_path, "gradients,modules,dtypes,memory", *ON_A_GPU, "--train.activation_checkpointing", "all")
    for row in table(folder / "gradients_rank0.csv"):
        assert float(row["device_milliseconds"]) > 0
    modules = table(folder / "modules_rank0.csv")
    assert {row["event"] for row in modules} == {"forward", "recompute", "backward"}
    assert all(float(row["device_milliseconds"]) >= 0 for row in modules if row["event"] == "forward")
    assert int(table(folder / "memory_rank0.csv")[-1]["saved_for_backward_bytes"]) > 0
    snapshot = pickle.loads((folder / "memory_snapshot_rank0.pickle").read_bytes())
    assert snapshot["segments"] and any(snapshot["device_traces"])
    assert {row["dtype"] for row in table(folder / "dtypes_rank0.csv") if row["kind"] == "parameter"} == {"float32"}


@needs_gpu
@pytest.mark.parametrize("graphs", ["false", "true"])
def test_the_profile_has_kernels(tmp_path, graphs):
    folder = traced(tmp_path, "profiler", *ON_A_GPU, "--train.cuda_graphs", graphs)
    assert "Self CUDA" in (folder / "operations_rank0.txt").read_text()
    with gzip.open(folder / "profile_rank0.json.gz", "rt") as file:
        kinds = {event.get("cat") for event in json.load(file)["traceEvents"]}
    assert "kernel" in kinds
