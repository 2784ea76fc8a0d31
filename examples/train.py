"""Training from Python: a configuration, a run, its metrics, and more steps.

    python examples/train.py

It writes into runs/example, and renames an earlier run there to example.old-1.
"""

from pathlib import Path

from trifocal.runlog import read_metrics
from trifocal.train import load_config, resume, train

# Any key of `trifocal new showcase`; a TOML file in place of None gives the values that are not named here.
overrides = {
    "run.directory": "runs/example", "run.device": "cpu", "data.source": "builtin", "data.shuffle_sequences": 16,
    "model.dim": 64, "model.num_layers": 2, "model.num_heads": 4, "model.num_kv_heads": 2, "model.head_dim": 16,
    "model.value_dim": 16, "model.mlp_dim": 128, "model.geometry.window_size": 32, "train.steps": 10,
    "train.sequence_length": 128, "train.global_batch_size": 4, "train.micro_batch_size": 4, "train.precision": "fp32",
    "evaluate.sequences": 4, "schedule.warmup_steps": 2, "log.interval_steps": 1, "log.sample_interval_steps": 0,
}  # fmt: skip
result = train(load_config(None, overrides), overwrite=True)
assert result.finished and result.evaluation is not None
print(f"validation loss {result.evaluation.validation_loss:.2f} nats per byte after {result.step} steps")

losses = [row["loss"] for row in read_metrics(Path("runs/example/metrics.jsonl"), "train")]
print("loss by step:", *(f"{loss:.2f}" for loss in losses))

# From the last checkpoint, to more steps.
config = load_config("runs/example/config.toml", {"train.steps": 14})
print(f"resumed to step {resume('runs/example', config=config).step}")
