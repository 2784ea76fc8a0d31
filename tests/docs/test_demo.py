"""`make demo`: what it says before it trains."""

from tests.docs.pages import ROOT
from trifocal.cli import main


def test_five_lines_say_what_is_trained_before_the_first_step(tmp_path, capsys):
    run = tmp_path / "demo run"
    flags = ["--train.steps", "2", "--train.sequence_length", "256", "--data.shuffle_sequences", "4"]
    flags += ["--log.sample_tokens", "2", "--evaluate.sequences", "2", "--schedule.warmup_steps", "1"]
    command = ["train", str(ROOT / "configs/demo.toml"), "--run.directory", str(run), "--run.device", "cpu", *flags]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines[:5]] == ["device", "model", "data", "folder", "watch"]
    assert "cores, fp32" in lines[0]
    assert "4 layers of width 64, 0.2 M parameters, window, selected attention" in lines[1]
    assert "builtin, 256 tokens a row, 2 rows a step" in lines[2] and lines[3].endswith(f"'{run}', 2 steps")
    assert lines[4].endswith(f"trifocal watch '{run}'")
    assert any(line.startswith("step 1/2") for line in lines[5:])
