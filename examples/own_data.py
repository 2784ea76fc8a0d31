"""Your own data: documents from anywhere as JSON lines, a look at the packed batches, and a run on them.

    python examples/own_data.py

It writes into runs/own_data, and renames an earlier run there to run.old-1.
"""

import json
from pathlib import Path

from trifocal.data import DataConfig, Loader, make_tokenizer
from trifocal.train import load_config, train

folder = Path("runs/own_data")
folder.mkdir(parents=True, exist_ok=True)
documents = (f"The square of {n} is {n * n}, and its cube is {n**3}." for n in range(2000))
with (folder / "facts.jsonl").open("w", encoding="utf-8") as file:
    for text in documents:
        file.write(json.dumps({"text": text}) + "\n")

# Documents are packed into rows; attention crosses no document boundary.
source = f"jsonl:{folder / 'facts.jsonl'}#text"
tokenizer = make_tokenizer("bytes")
config = DataConfig(source=source, shuffle_sequences=16)
with Loader(config, tokenizer=tokenizer, sequence_length=128, batch_size=2, vocab_size=257) as loader:
    batch = next(loader)
print("a batch:", tuple(batch.tokens.shape), "tokens;", len(batch.cu_seqlens) - 1, "documents")
print("its first row:", tokenizer.decode(batch.tokens[0, :60].tolist()))

# parquet:PATH#field, text:PATH and hf:NAME#field work the same way: docs/data.md has all sources.
overrides = {
    "run.directory": str(folder / "run"), "run.device": "cpu", "data.source": source, "data.shuffle_sequences": 16,
    "model.dim": 64, "model.num_layers": 1, "model.num_heads": 4, "model.num_kv_heads": 2, "model.head_dim": 16,
    "model.value_dim": 16, "model.mlp_dim": 128, "model.geometry.window_size": 32, "train.steps": 10,
    "train.sequence_length": 128, "train.global_batch_size": 4, "train.micro_batch_size": 4, "train.precision": "fp32",
    "evaluate.sequences": 4, "schedule.warmup_steps": 2, "log.sample_interval_steps": 0,
}  # fmt: skip
result = train(load_config(None, overrides), overwrite=True)
assert result.evaluation is not None
print(f"validation loss {result.evaluation.validation_loss:.2f} nats per byte")
