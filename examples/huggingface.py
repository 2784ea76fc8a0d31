"""From a run to transformers and back, on a CPU in under a minute, without a network.

    pip install 'trifocal[hf]' accelerate
    python examples/huggingface.py

Each `# %%` is a cell of a notebook. docs/huggingface.md explains the steps, and what a Mac needs; a test compares its
blocks with these.
"""

# %% A folder for everything that is written
import os
import tempfile

directory = tempfile.mkdtemp(prefix="trifocal_")
os.chdir(directory)

# %% A run becomes a folder that transformers reads
from trifocal.cli import main
from trifocal.train import load_config, train

SMALL = "--train.sequence_length 128 --train.global_batch_size 4 --train.micro_batch_size 4 --run.device cpu"
SMALL += " --evaluate.sequences 8 --log.sample_interval_steps 0 --log.telemetry_interval_steps 0"
SIZES = "--model.dim 64 --model.num_layers 2 --model.num_heads 4 --model.num_kv_heads 2 --model.head_dim 16"
SIZES += " --model.value_dim 16 --model.mlp_dim 128 --model.geometry.window_size 32"
SIZES += " --run.directory runs/tiny --data.source builtin --train.steps 8"
train(load_config(None, f"{SIZES} {SMALL}".split()))
assert main(["export", "runs/tiny", "exported"]) == 0

# %% Load it, and generate
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from trifocal.hf import TrifocalForCausalLM

model = AutoModelForCausalLM.from_pretrained("exported")
assert isinstance(model, TrifocalForCausalLM)
tokenizer = AutoTokenizer.from_pretrained("exported", padding_side="left")
batch = tokenizer(["import ", "def main("], return_tensors="pt", padding=True)
tokens = model.generate(**batch, max_new_tokens=20, do_sample=True, top_p=0.95)
texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
assert writer("class ", max_new_tokens=8)[0]["generated_text"].startswith("class ")
print(*texts, sep="\n")

# %% Fine-tune it
import transformers

lines = [f"def add_{n}(x):\n    return x + {n}\n" for n in range(64)]
rows = [{"input_ids": tokenizer(line + tokenizer.eos_token)["input_ids"]} for line in lines]
arguments = transformers.TrainingArguments(
    "tuned",
    max_steps=10,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    logging_nan_inf_filter=False,
    dataloader_pin_memory=torch.cuda.is_available(),
    disable_tqdm=True,
    report_to=[],
)
trainer = transformers.Trainer(
    model,
    arguments,
    train_dataset=rows[8:],
    eval_dataset=rows[:8],
    data_collator=transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True),
)
before = trainer.evaluate()["eval_loss"]
trainer.train()
assert trainer.evaluate()["eval_loss"] < before
trainer.save_model("tuned/final")
tokenizer.save_pretrained("tuned/final")
print(f"loss before {before:.3f}, after {trainer.evaluate()['eval_loss']:.3f}")

# %% Convert a dense model
config = transformers.LlamaConfig(
    vocab_size=257,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
dense = transformers.LlamaForCausalLM(config).eval()
dense.save_pretrained("dense")
tokenizer.save_pretrained("dense")
assert main(["convert", "dense", "sparse", "--to", "selected", "--dense-layers", "0"]) == 0
sparse = AutoModelForCausalLM.from_pretrained("sparse")
assert sparse.config.model["layer_types"] == ["dense", "selected"]
tokens = torch.arange(100)[None]
with torch.no_grad():
    # The blocks cover a hundred tokens.
    assert torch.allclose(sparse(tokens).logits, dense(tokens).logits, atol=1e-4)

# %% Train the converted model on, and export it
on = "--model.from sparse --data.source builtin --train.steps 4 --run.directory runs/on"
train(load_config(None, f"{on} {SMALL}".split()))
assert main(["export", "runs/on", "exported_on"]) == 0
again = AutoModelForCausalLM.from_pretrained("exported_on")
assert again.config.model["layer_types"] == ["dense", "selected"]
print("everything is in", directory)
