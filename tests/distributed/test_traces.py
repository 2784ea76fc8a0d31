"""Traces of two processes: the exchanges of DDP and FSDP2, and the order in which gradients arrive."""

import json
from collections import Counter

import pytest

from tests.distributed.test_faults import QUICK
from tests.distributed.workers import train
from tests.train.test_traces import table
from tests.train.tiny import make_config, write_config
from trifocal.models import DecoderLM
from trifocal.runlog.jsonl import read_lines
from trifocal.runlog.traces.tracer import TRACES

TRACED = "traces/steps_2-3"
EVERY_TRACE = ",".join(TRACES)


def traced(folder, mode):
    """Two processes with one micro-batch each a step, steps 2 and 3 traced."""
    flags = (*QUICK, "--parallel.mode", mode, "--trace.what", EVERY_TRACE, "--trace.steps", "2:4")
    train(folder, write_config(folder), *flags).finish()
    return folder / "run"


@pytest.fixture
def sizes(tmp_path):
    """The parameters of the tiny model by name."""
    model = DecoderLM(make_config(tmp_path).model)
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def test_buckets_of_ddp_hold_every_gradient_once(tmp_path, sizes):
    run = traced(tmp_path, "ddp")
    every_trace_saw_something(run, "ddp", 4 * sum(sizes.values()))
    folder = run / TRACED
    for rank in (0, 1):
        rows = table(folder / f"exchange_rank{rank}.csv")
        for step in ("2", "3"):
            mine = [row for row in rows if row["step"] == step]
            assert {(row["exchange"], row["phase"], row["dtype"]) for row in mine} == {
                ("all_reduce", "backward", "float32")
            }
            assert Counter(name for row in mine for name in row["parameters"].split()) == Counter(list(sizes))
            assert sum(int(row["bytes"]) for row in mine) == 4 * sum(sizes.values())
            assert all(float(row["host_milliseconds"]) > 0 for row in mine)
        arrived = table(folder / f"gradients_rank{rank}.csv")
        assert Counter((row["step"], row["parameter"]) for row in arrived) == Counter(
            (step, name) for step in ("2", "3") for name in sizes
        )
        figures = json.loads((folder / f"ddp_rank{rank}.json").read_text())
        assert figures["backend_name"] == "gloo" and figures["total_parameter_size_bytes"] == 4 * sum(sizes.values())
        collectives = Counter(row["operation"] for row in table(folder / f"collectives_rank{rank}.csv"))
        assert collectives["all_reduce"] >= 2 * len(mine)


def test_weights_are_gathered_and_gradients_scattered_part_by_part(tmp_path, sizes):
    run = traced(tmp_path, "fsdp")
    # Every first dimension of the tiny model is even: half of each parameter.
    every_trace_saw_something(run, "fsdp", 2 * sum(sizes.values()))
    folder = run / TRACED
    rows = [row for row in table(folder / "exchange_rank1.csv") if row["step"] == "2"]
    kinds = Counter((row["exchange"], row["of"]) for row in rows)
    for part in ("model", "blocks.0", "blocks.1"):
        assert kinds["reduce_scatter", part] == 1
        assert kinds["all_gather", part] in (1, 2), "gathered for forward, and again for backward where it was freed"
    assert kinds["all_gather", "blocks.0"] == 2
    scattered = {row["of"]: int(row["bytes"]) for row in rows if row["exchange"] == "reduce_scatter"}
    # Sharded along the first dimension, which is padded to the processes.
    assert scattered["blocks.0"] >= 4 * sum(size for name, size in sizes.items() if name.startswith("blocks.0."))
    order = [row["of"] for row in rows if row["exchange"] == "reduce_scatter"]
    assert order == ["blocks.1", "blocks.0", "model"]
    arrived = Counter(row["parameter"] for row in table(folder / "gradients_rank1.csv") if row["step"] == "2")
    assert arrived == Counter(list(sizes))
    kept = [row for row in table(folder / "dtypes_rank1.csv") if row["kind"] == "parameter"]
    assert {row["name"] for row in kept} == set(sizes)
    shape = next(row["shape"] for row in kept if row["name"] == "blocks.0.mlp.up_proj.weight")
    assert shape == "16x16", "half of 32 x 16"


def every_trace_saw_something(run, mode, parameter_bytes):
    """And the memory table counts the part of each process."""
    saved = []
    for rank in (0, 1):
        for name in ("gradients", "modules", "exchange", "collectives", "dtypes", "memory"):
            assert table(run / TRACED / f"{name}_rank{rank}.csv"), f"{name} of rank {rank} saw nothing"
        assert (run / TRACED / f"profile_rank{rank}.json.gz").exists()
        assert (run / TRACED / f"operations_rank{rank}.txt").exists()
        rows = {row["module"]: row for row in table(run / TRACED / f"memory_rank{rank}.csv")}
        total = rows["total"]
        assert abs(int(total["parameter_bytes"]) - parameter_bytes) <= 4 * 257 * 16
        assert int(total["gradient_bytes"]) == int(total["parameter_bytes"])
        assert int(total["optimizer_bytes"]) >= 2 * int(total["parameter_bytes"])
        saved.append({name: int(row["saved_for_backward_bytes"]) for name, row in rows.items()})
        beats = read_lines(run / "heartbeat" / f"rank{rank}.jsonl")
        assert {beat["parallel_mode"] for beat in beats} == {mode}
    # One micro-batch of two rows of 32 tokens: the down projection keeps its input, 2 x 32 x 32, and no weight.
    assert saved[0]["blocks.0.mlp.down_proj"] == saved[1]["blocks.0.mlp.down_proj"] == 4 * 2 * 32 * 32
