"""`trifocal bench` as a person types it."""

import json
import re
from dataclasses import replace

import pytest

from trifocal.bench import plot
from trifocal.cli import bench as cli_bench
from trifocal.cli import main

ATTENTION = [
    "bench", "attention", "--tokens", "40", "72", "--heads", "4/2", "--head-dim", "16", "--dtype", "fp32",
    "--device", "cpu", "--rows", "whole", "flash", "--call-seconds", "1e-4", "--first-call", "false",
    "--geometry.compression_block_size", "8", "--geometry.compression_stride", "4",
    "--geometry.selection_block_size", "16", "--geometry.num_selected_blocks", "3",
    "--geometry.num_initial_blocks", "1", "--geometry.num_local_blocks", "1", "--geometry.window_size", "16",
]  # fmt: skip


def test_a_run_from_flags_to_files(tmp_path, capsys):
    assert main([*ATTENTION, "--output", str(tmp_path), "--commit", "abc", "--name", "short"]) == 0
    text = capsys.readouterr().out
    for words in ("fwd+bwd ms", "dense flash", "times faster", "crossovers", "parity of"):
        assert words in text
    (path,) = tmp_path.glob("short_cpu_*.json")
    content = json.loads(path.read_text())
    assert content["commit"] == "abc" and content["command"].startswith("trifocal bench attention --tokens 40 72")
    assert [row["tokens"] for row in content["rows"]] == [40, 40, 72, 72]
    assert content["times_faster"] and content["crossovers"] and content["first_calls"] == []
    assert path.with_suffix(".md").exists() and str(path) in text
    picture = path.with_suffix(".png")
    assert picture.exists()
    picture.unlink()
    assert main(["bench", "plot", str(path)]) == 0
    assert picture.exists()


def test_parts_have_tables_of_their_own(tmp_path, capsys):
    flags = [
        "--parts",
        "layer",
        "model",
        "--sizes",
        "1x9",
        "--plain",
        "false",
        "--layer-sizes",
        "1x20",
        "--row-seconds",
    ]
    sizes = ["--model.num_layers", "1", "--model.dim", "32", "--model.mlp_dim", "16", "--new-tokens", "2"]
    words = ["bench", "decode", *flags, "1e-3", *sizes, "--device", "cpu", "--precision", "fp32"]
    assert main([*words, "--output", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    model, layer = (
        re.search(rf"\n{part} +\n.*?\n( *attention .*?)\n", text, re.DOTALL)[1] for part in ("model", "layer")
    )
    assert "ms/token" in model and "floor ms" not in model
    assert "floor ms" in layer and "ms/token" not in layer


def test_without_matplotlib_a_line_says_how_to_draw_later(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("trifocal.cli.bench.can_plot", lambda: False)
    assert main([*ATTENTION, "--output", str(tmp_path)]) == 0
    assert re.search(
        r"no plot: .*pip install 'trifocal\[docs\]', then trifocal bench plot \S+\.json", capsys.readouterr().out
    )
    assert plot.MISSING


def test_what_failed_gives_status_1_and_stands_below_the_table(tmp_path, capsys, monkeypatch):
    def broken(*args, **rules):
        raise RuntimeError("no kernel")

    monkeypatch.setattr("trifocal.bench.attention_speed.nsa_attention", broken)
    assert main([*ATTENTION, "--output", str(tmp_path)]) == 1
    assert "\nfailed: RuntimeError: no kernel\n" in capsys.readouterr().out


@pytest.mark.parametrize("bench", ["attention", "train", "decode", "kernels", "plot"])
def test_every_bench_has_help(capsys, bench):
    assert main(["bench", bench, "--help"]) == 0
    assert f"usage: trifocal bench {bench}" in capsys.readouterr().out


def test_bad_input_is_one_line(capsys):
    assert main(["bench"]) == 2 and main(["bench", "--help"]) == 0
    assert "attention" in capsys.readouterr().out
    for arguments, words in (
        (["atention"], 'unknown bench "atention"; the nearest valid one is "attention"'),
        (["attention", "--token", "5"], 'the nearest valid one is "--tokens"'),
        (["attention", "--shapes", "E"], 'unknown shape "E"'),
        (["attention", "--rows", "cudn"], "--rows"),
        (["train", "--sizes", "16"], "sequences x tokens"),
        (["train", "--model.attention", "dense"], "choose the rows with --attention"),
        (["decode", "--new-tokens", "0"], "--new-tokens must be at least 1"),
        (["kernels", "--device", "cpu"], "there is no CUDA device here"),
        (["kernels", "--shapes", "E"], 'unknown shape "E"'),
        (["plot", "absent.json"], "cannot read absent.json"),
    ):
        assert main(["bench", *arguments]) == 2, arguments
        error = capsys.readouterr().err
        assert words in error and re.fullmatch(r"trifocal: [^\n]+\n", error), error


@pytest.mark.parametrize("bench", ["attention", "train", "decode", "kernels"])
def test_an_output_that_is_no_folder_is_refused_before_any_work(tmp_path, capsys, monkeypatch, bench):
    def work(*_):
        raise AssertionError("the bench began")

    monkeypatch.setitem(cli_bench.BENCHES, bench, replace(cli_bench.BENCHES[bench], measure=work))
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(["bench", bench, "--device", "cpu", "--output", str(output)]) == 2
        error = capsys.readouterr().err
        assert error == f"trifocal: cannot write into {output}: {tmp_path / 'file'} is not a folder\n"
