"""`benchmarks/many_gpus.py`: what the parts run, their limits, and the rows of all of them together."""

import json
import sys
from pathlib import Path

from tests import warm
from tests.children import load_script

many_gpus = load_script("benchmarks/many_gpus.py")
SCRIPTS = {name: load_script(f"benchmarks/{name}.py") for name in ("context", "scale")}


def results(folder):
    (file,) = folder.glob("many_gpus_*.json")
    return dict(json.loads(file.read_text()))


def test_a_part_that_takes_too_long_is_stopped(tmp_path, monkeypatch):
    """Two at the same time, and one after them: each has its own end, and sees its own GPU."""
    warm.take_the_place_of_subprocess(monkeypatch, many_gpus.__name__)
    sleeps = "import time; print('begun', flush=True); time.sleep(600)"
    fails = "import os; print(os.environ['CUDA_VISIBLE_DEVICES']); raise SystemExit(3)"
    slow, bad = (
        many_gpus.Part(*given) for given in (("slow", 1.0, tmp_path / "slow"), ("bad", 60, tmp_path / "bad", "5"))
    )
    many_gpus.run([(slow, ["-c", sleeps]), (bad, ["-c", fails])])
    assert (slow.status, bad.status) == ("stopped after 1 s", "failed: exit status 3")
    assert 1 <= slow.took < 10 and (slow.log.read_text(), bad.log.read_text()) == ("begun\n", "5\n")
    done = many_gpus.Part("done", 60.0, tmp_path / "done")
    many_gpus.run([(done, ["-c", ""])])
    assert done.summary() == {"name": "done", "status": "ok", "seconds": done.took}


def test_every_part_is_a_command_of_its_script(tmp_path, monkeypatch):
    """The scripts' own arguments and results, without what they measure: eight GPUs; four can hold a long layer."""
    speeds = {1: 100.0, 8: 760.0}

    def layer(size, options):
        status = "ok" if options.tokens / size <= many_gpus.LONG / 4 else "left out: needs 81 GiB a GPU"
        head = {"part": "layer", "gpus": size, "tokens": options.tokens, "status": status}
        return head if status != "ok" else head | {"ms": options.tokens / size, "peak_gib": 1.0}

    def measure(mode, size, seconds, options):
        assert seconds > 60 and options.set == ["data.streams=8"]
        return {"outcome": "ended", "step_ms": 1.0, "tokens_per_second": speeds[size]}, ""

    def trained(size, steps, tokens, flags, *others):
        error = 0.0 if flags["train.precision"] == "fp32" else 0.01 * size
        return [{"loss": 5.0}] * (steps - 1) + [{"loss": 5.0 + error}], "ok"

    monkeypatch.setattr(SCRIPTS["context"], "layer_row", layer)
    monkeypatch.setattr(SCRIPTS["context"], "trained", trained)
    monkeypatch.setattr(SCRIPTS["scale"], "measure", measure)

    def run(group):
        for number, (part, arguments) in enumerate(group):
            part.log.write_text("= 17 passed =\n")
            assert part.gpu == (visible[number] if part.name in many_gpus.ON_ONE else None)
            if arguments[0] == "-m":
                assert all(Path(path).exists() for path in many_gpus.TESTS) and str(many_gpus.WORKERS) in arguments
                part.status = "ok"
                continue
            with monkeypatch.context() as patch:
                patch.setattr(sys, "argv", arguments)
                status = SCRIPTS[Path(arguments[0]).stem].main()
            part.status = f"failed: exit status {status}" if status else "ok"

    visible = ["7", "6", "5", "4", "3", "2", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(visible))
    monkeypatch.setattr(many_gpus, "run", run)
    # Losses of eight GPUs that err by too much.
    assert many_gpus.main(["--gpus", "8", "--output", str(tmp_path), "--commit", "abc"]) == 1
    found = results(tmp_path)
    assert {part["name"]: part["status"] for part in found["parts"]} == dict.fromkeys(many_gpus.SECONDS, "ok")
    assert [part.get("output") for part in found["parts"] if part["name"] == "tests"] == ["17 passed"]
    layers = {(row["tokens"], row["gpus"]): row for row in found["rows"] if row["part"] == "layer"}
    longest = layers[many_gpus.LONG, 8]
    assert (longest["base_gpus"], longest["efficiency"], longest["sfnsa_backward_ms"]) == (4, 1.0, 1509.2)
    assert layers[many_gpus.SHORT, 8]["base_gpus"] == 1 and "sfnsa_backward_ms" not in layers[many_gpus.SHORT, 8]
    assert layers[many_gpus.LONG, 2]["status"].startswith("left out")
    speeds_found = [(row["mode"], row["efficiency"]) for row in found["rows"] if row["part"] == "text"]
    assert speeds_found == [("none", 1.0), ("ddp", 0.95), ("fsdp", 0.95), ("hsdp", 0.95)]
    losses = [row for row in found["rows"] if row["part"] == "losses"]
    assert losses[2]["status"].startswith("failed: errs") and losses[1]["status"] == "ok"
