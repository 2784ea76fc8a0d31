"""`benchmarks/demo_model.py`: from a run to a folder that the name `demo` stands for."""

import pytest
import torch
from safetensors.torch import load_file

import trifocal
from tests.children import load_script
from tests.cli.test_commands import refused
from trifocal.runlog.run import read_run
from trifocal.train import load_config, train
from trifocal.train.checkpoint import pretrained
from trifocal.train.run_folder import load_run

demo_model = load_script("benchmarks/demo_model.py")
# The recipe of the preset with a smaller model and fewer tokens.
SMALL = {
    "model.dim": 16,
    "model.num_layers": 4,
    "model.mlp_dim": 16,
    "run.device": "cpu",
    "train.steps": 2,
    "schedule.warmup_steps": 1,
    "train.sequence_length": 640,
    "train.global_batch_size": 2,
    "train.micro_batch_size": 2,
    "train.compile": False,
    "evaluate.sequences": 4,
    "log.sample_tokens": 1,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "run"
    train(load_config("python", SMALL | {"run.directory": str(folder)}))
    return folder


@pytest.fixture
def folder(run, tmp_path, monkeypatch):
    """The model of the package, for one test."""
    folder = tmp_path / "package" / "demo_model"
    folder.mkdir(parents=True)
    (folder / "old.safetensors").touch()
    demo_model.write_folder(run, folder)
    monkeypatch.setattr(pretrained, "DEMO_FOLDER", folder)
    monkeypatch.chdir(tmp_path)
    return folder


def test_the_folder(run, folder):
    """The weights in bf16, and a page with the command and the loss of the run; nothing else is left."""
    assert {path.name for path in folder.iterdir()} == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    trained = trifocal.load_model(run).state_dict()
    loaded = trifocal.load_model("demo")
    assert {x.dtype for x in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert all(torch.equal(x, trained[name].bfloat16()) for name, x in loaded.state_dict().items())
    text = (folder / "README.md").read_text(encoding="utf-8")
    [row] = read_run(run).of_kind("evaluation")
    assert f"{row['validation_loss']:.4f} nats a byte, {row['bits_per_byte']:.4f} bits" in text
    command = next(line for line in text.splitlines() if line.startswith("trifocal train python "))
    flags = command.split()[3:]
    again = load_config("python", [*flags, "--run.directory", str(run), "--run.device", "cpu"])
    assert again == load_run(run)


def test_a_path_of_this_name_goes_first(run, folder, tmp_path, capsys):
    (tmp_path / "demo").symlink_to(run)
    assert trifocal.load_model("demo").embedding.weight.dtype == torch.float32
    note = f"note: demo is {tmp_path / 'demo'}, not the model that comes with the package\n"
    assert capsys.readouterr() == ("", note)
    assert trifocal.load_model(tmp_path / "demo").embedding.weight.dtype == torch.float32
    assert capsys.readouterr() == ("", "")
    (tmp_path / "demo").unlink()
    # A path is no name.
    assert "no such folder" in refused(capsys, "generate", "./demo", "--prompt", "x")
