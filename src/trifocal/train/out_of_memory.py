"""What to lower when a configuration does not fit the memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trifocal.errors import one_line
from trifocal.ops.devices import is_out_of_memory
from trifocal.train.config.sections import RunConfig


def memory_remedies(config: RunConfig, num_devices: int = 1) -> list[str]:
    """Flags that lower the memory of a step, in the order to try them; the first ones leave the result as it is."""
    train, context = config.train, config.parallel.context
    groups = config.parallel.groups(num_devices)
    share, at_once = train.global_batch_size // groups, train.sequences_at_once(groups)
    smaller = [size for size in range(1, at_once) if share % size == 0]
    found = [f"--train.micro_batch_size {smaller[-1]}"] if smaller else []
    first, last = train.checkpointed_layers(config.model.num_layers)
    if last - first < config.model.num_layers:
        found.append("--train.activation_checkpointing all")
    if num_devices > 1 and config.parallel.mode not in ("fsdp", "hsdp"):
        found.append("--parallel.mode fsdp")
    if num_devices > context and train.sequence_length % (2 * num_devices) == 0:
        found.append(f"--parallel.context {num_devices}")
    # Processes that share a row need equal chunks of it.
    chunks = 2 * context if context > 1 else 1
    if shorter := train.sequence_length // (2 * chunks) * chunks:
        found.append(f"--train.sequence_length {shorter}")
    if num_devices == 1:
        found.append("several GPUs with --parallel.mode fsdp")
    return found


@contextmanager
def remedies_on_out_of_memory(*remedies: str) -> Iterator[None]:
    """Name the remedies in a torch.OutOfMemoryError of one line where an allocation fails."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        named = torch.OutOfMemoryError(f"out of memory ({one_line(error, 160)}); try {', or '.join(remedies)}")
        for note in getattr(error, "__notes__", ()):
            named.add_note(note)
        raise named from error
