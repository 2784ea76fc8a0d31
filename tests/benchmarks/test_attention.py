"""`benchmarks/attention.py` on a CPU with the reference: every row, its figures, refusals, limits and files."""

import json

import pytest

from lib import block_choices
from lib.recorder import Recorder, Refused
from tests.children import load_script
from trifocal.ops import Geometry

attention = load_script("benchmarks/attention.py")
AttentionBench, AttentionOptions = attention.AttentionBench, attention.AttentionOptions
GEOMETRY = Geometry(8, 4, 16, 3, 1, 1, 16)
TINY = {
    "tokens": (48, 80), "heads": ("4/2",), "head_dim": 16, "value_dim": 8, "geometry": GEOMETRY, "dtype": "fp32",
    "device": "cpu", "call_seconds": 1e-4,
}  # fmt: skip


def bench(**changes):
    said = []
    options = AttentionOptions(**{**TINY, **changes})
    made = AttentionBench(options, Recorder(options.seconds, said.append, lambda: None))
    made.run()
    return made, said


@pytest.fixture(scope="module")
def everything():
    return bench(choices=("random", "smooth", "real"))[0].recorder.rows


def test_rows_of_every_kind(everything):
    found = [(row["row"], row["choices"], row["status"].partition(":")[0]) for row in everything if row["tokens"] == 80]
    assert found == [
        ("dense cudnn", "", "not available"),
        ("dense flash", "", "ok"),
        ("end to end", "random", "ok"),
        ("whole", "random", "ok"),
        ("one branch", "random", "ok"),
        ("compressed", "", "ok"),
        ("scoring", "", "ok"),
        ("selected", "random", "ok"),
        ("window", "", "ok"),
        ("whole", "smooth", "ok"),
        ("one branch", "smooth", "ok"),
        ("selected", "smooth", "ok"),
        ("choices", "real", "not available"),
        ("dense fa4", "", "not available"),
        ("flex window", "", "not available"),
        ("fla parallel_nsa", "", "not available"),
        ("sfnsa", "", "not available"),
        ("flash-msa", "", "not available"),
    ]


def test_figures_fit_one_another(everything):
    json.dumps(everything)
    for row in everything:
        if row["status"] != "ok":
            continue
        assert row["forward_tflop_per_second"] == pytest.approx(row["forward_tflop"] / row["forward_ms"] * 1000)
        if row["row"] != "scoring":
            assert row["backward_ms"] == pytest.approx(row["forward_backward_ms"] - row["forward_ms"])
            assert row["forward_backward_tflop"] > row["forward_tflop"]
            assert row["forward_backward_gib"] > row["forward_gib"] > 0
        assert row["backend"] == (None if row["row"].startswith("dense") else "reference")
    at_80 = {(row["row"], row["choices"]): row for row in everything if row["tokens"] == 80}
    parts = [at_80[key] for key in (("compressed", ""), ("scoring", ""), ("selected", "random"), ("window", ""))]
    assert sum(part["forward_tflop"] for part in parts) == pytest.approx(at_80["whole", "random"]["forward_tflop"])
    # Five blocks, of which three are chosen.
    unions = {at_80[row, "smooth"]["blocks_of_8_neighbours"] for row in ("whole", "one branch")}
    assert len(unions) == 1 and 1 <= unions.pop() <= 5 / 3


def test_wrong_results_are_not_timed(monkeypatch):
    def refuse(*args):
        raise Refused("the gradient of q is off")

    monkeypatch.setattr(attention, "check_parity", refuse)
    made, said = bench(tokens=(48,), rows=("whole", "parts", "flash", "end_to_end"))
    statuses = {row["row"]: row["status"] for row in made.recorder.rows}
    assert statuses == {"dense flash": "ok", "sparse": "refused: the gradient of q is off"}
    assert made.recorder.exit_status == 1 and any("refused" in line for line in said)


FLAGS = [
    "--tokens", "40", "72", "--heads", "4/2", "--head-dim", "16", "--dtype", "fp32", "--device", "cpu",
    "--rows", "whole", "flash", "--choices", "random", "--call-seconds", "1e-4",
    "--geometry.compression_block_size", "8", "--geometry.compression_stride", "4",
    "--geometry.selection_block_size", "16", "--geometry.num_selected_blocks", "3",
    "--geometry.num_initial_blocks", "1", "--geometry.num_local_blocks", "1", "--geometry.window_size", "16",
]  # fmt: skip


def test_a_run_from_flags_to_files(tmp_path, capsys):
    assert attention.ATTENTION.main([*FLAGS, "--output", str(tmp_path), "--commit", "abc", "--name", "short"]) == 0
    text = capsys.readouterr().out
    for words in ("fwd+bwd ms", "dense flash", "times faster", "crossovers", "parity of"):
        assert words in text
    (path,) = tmp_path.glob("short_cpu_*.json")
    content = json.loads(path.read_text())
    assert content["commit"] == "abc"
    assert content["command"].startswith("python benchmarks/attention.py --tokens 40 72")
    assert [row["tokens"] for row in content["rows"]] == [40, 40, 72, 72]
    assert content["times_faster"] and content["crossovers"]
    page = path.with_suffix(".md").read_text()
    assert all(words in page for words in ("commit `abc`", "`python benchmarks/attention.py", "| whole |"))
    assert str(path) in text


def test_what_failed_gives_status_1_and_bad_flags_status_2(tmp_path, capsys, monkeypatch):
    assert attention.ATTENTION.main([*FLAGS, "--shapes", "Z"]) == 2
    assert 'attention.py: unknown shape "Z"' in capsys.readouterr().err

    def broken(*args, **rules):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(block_choices, "nsa_attention", broken)
    assert attention.ATTENTION.main([*FLAGS, "--output", str(tmp_path)]) == 1
    assert "\nfailed: RuntimeError: no kernel\n" in capsys.readouterr().out
