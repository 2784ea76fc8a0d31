"""The smallest run that has every part: two layers, packed documents of real words, accumulation, checkpoints."""

import random
import warnings

import torch
import torch.distributed.checkpoint as dcp

from trifocal.data import make_tokenizer
from trifocal.models import save_weights
from trifocal.testing.small_models import make_model, small_config
from trifocal.train import load_config
from trifocal.train.step.step import TrainStep

WORDS = ("quick", "brown", "fox", "jumps", "over", "lazy", "dog", "seven", "wizards", "liquid", "ink", "a")

TOML = """
[run]
directory = "{directory}"
seed = 7
device = "cpu"

[model]
dim = 16
num_layers = 2
num_heads = 4
num_kv_heads = 2
head_dim = 8
value_dim = 8
mlp_dim = 32

[model.geometry]
compression_block_size = 4
compression_stride = 2
selection_block_size = 8
num_selected_blocks = 3
num_initial_blocks = 1
num_local_blocks = 1
window_size = 8

[data]
source = "text:{text}"
validation_fraction = 0.3
shuffle_documents = 4
shuffle_sequences = 7

[train]
steps = 6
sequence_length = 32
global_batch_size = 4
micro_batch_size = 2

[optimizer]
learning_rate = 1e-2

[schedule]
warmup_steps = 2

[checkpoint]
interval_steps = 2
keep_last = 2

[evaluate]
interval_steps = 3
sequences = 4

[log]
interval_steps = 1
heartbeat_seconds = 60.0
"""


def write_documents(folder, count=24):
    """Text files of 10 to 60 random words each: some longer than a row of 32 bytes, some border inside most rows."""
    generator = random.Random(3)
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        words = generator.choices(WORDS, k=generator.randint(4, 30))
        (folder / f"{index:02}.txt").write_text(" ".join(words) + "\n")
    return folder


def write_model(folder, *, longest=128, attention="dense", vocab_size=257, **changes):
    """A small model, and the tokenizer of bytes beside it; the folder."""
    model = make_model(small_config(attention=attention, vocab_size=vocab_size, **changes), torch.device("cpu"))
    save_weights(model, folder, max_position_embeddings=longest)
    make_tokenizer("bytes").save(folder)
    return folder


def write_config(folder, name="run"):
    """A TOML file of the tiny run, its documents beside it, its run directory `folder/name`."""
    text = write_documents(folder / "text")
    path = folder / f"{name}.toml"
    path.write_text(TOML.format(directory=folder / name, text=text))
    return path


def make_config(folder, *overrides, name="run"):
    """The tiny run's configuration with overrides."""
    return load_config(write_config(folder, name), overrides)


def read_checkpoint(path):
    """Every tensor of a checkpoint, by name, without building a model."""
    reader = dcp.HuggingFaceStorageReader(str(path / "weights"))
    metadata = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        for name, item in metadata.items()
        if hasattr(item, "properties")
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def assert_same_tensors(mine, theirs):
    """The same names, and the same bits."""
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


class Repeater:
    """In place of `GraphRecorder`: a replay repeats the work and overwrites the first result, as a recording would."""

    recordings = 0
    passes = 0
    memory_bytes = 0

    def __init__(self, device):
        assert device.type == "cpu"

    def warm_up(self, work):
        """One pass."""
        Repeater.passes += 1
        return work()

    def record(self, work):
        """A recording does nothing yet."""
        Repeater.recordings += 1
        results = []

        def replay():
            results[:] = self.warm_up(work)

        return replay, results


def before_step(patch, action):
    """Call `action(step, parts)` before every training step; the parts are `loss_function`, `optimizer` and others."""
    original = TrainStep.run

    def wrapped(self, step, *args, **kwargs):
        action(step, vars(self))
        return original(self, step, *args, **kwargs)

    patch.setattr(TrainStep, "run", wrapped)
