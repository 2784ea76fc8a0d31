"""Parallelizing the model of a run by its configuration."""

from trifocal.distributed import Parallel, Processes, choose_mode, parallelize
from trifocal.errors import UserError
from trifocal.models import DecoderLM
from trifocal.train.run_config import RunConfig


def parallelize_model(model: DecoderLM, config: RunConfig, processes: Processes) -> tuple[Parallel, str]:
    """Parallelize a model by `config.parallel`.

    Args:
        model: On its device, the same in all processes.
        config: The run.
        processes: Of the run.

    Returns:
        The model as it is trained, and a sentence for the log, which may be empty.

    Raises:
        UserError: If the mode does not fit the number of processes.
    """
    section, device = config.parallel, processes.device
    mode, note = choose_mode(section.mode, processes, config.model)
    if mode == "hsdp" and (section.shards or processes.local_size) == 1:
        why = "parallel.shards is 1" if section.shards else "each machine has one process, and parallel.shards is 0"
        raise UserError(f'{why}: hsdp would share nothing; take parallel.mode "fsdp" or "ddp", or more shards')
    parallel = parallelize(
        model,
        processes,
        mode,
        precision=config.train.precision,
        shards=section.shards,
        reshard_after_forward=section.reshard_after_forward,
        static_graph=section.static_graph,
        exchange_after=config.train.cuda_graphs and device.type == "cuda",
        repeatable=config.run.deterministic or device.type == "cpu",
    )
    return parallel, note
