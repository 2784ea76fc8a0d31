"""The parts of a run that exist before its folder: model, optimizer, data."""

import threading
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from trifocal.data import Batch, Loader, Tokenizer
from trifocal.data.prefetch import LOOK_SECONDS
from trifocal.distributed.parallel import Parallel, choose_mode, parallelize
from trifocal.distributed.processes import DistributedContext
from trifocal.errors import UserError, one_line
from trifocal.models import DecoderLM
from trifocal.models.decoder import Distillation, meta_model
from trifocal.train.checkpoint.pretrained import load_frozen, load_pretrained_weights
from trifocal.train.checkpoint.random_state import restore_random_state, seed_everything
from trifocal.train.checkpoint.save_load import load_checkpoint
from trifocal.train.choice_teacher import ChoiceTeacher
from trifocal.train.config.sections import RunConfig
from trifocal.train.step.cuda_graphs import make_graphs
from trifocal.train.step.micro_batch import LossFunction
from trifocal.train.step.optimizer import freeze, make_optimizer
from trifocal.train.step.schedule import change_step
from trifocal.train.validation_loss import read_validation_batches

T = TypeVar("T")


@dataclass
class TrainState:
    """The counters of a run: steps that are done, the step that it continues from, the last loss that was read from the
    device, in nats per token, and the state of this process's loader after the last step.
    """

    step: int = 0
    resume_step: int | None = None
    loss: float | None = None
    data_position: dict[str, Any] = field(default_factory=dict)

    @property
    def steps_here(self) -> int:
        """Steps that this process has taken."""
        return self.step - (self.resume_step or 0)


def in_thread(work: Callable[[], T], name: str) -> "futures.Future[T]":
    """Work in a thread that ends with the process."""
    future: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # Raised by `result`.
            future.set_exception(error)

    threading.Thread(target=run, name=f"trifocal-{name}", daemon=True).start()
    return future


def parallelize_model(model: DecoderLM, config: RunConfig, processes: DistributedContext) -> tuple[Parallel, str]:
    """The model as it is trained, by `config.parallel`, and a sentence for the log, which may be empty."""
    section, device = config.parallel, processes.device
    mode, note = choose_mode(section.mode, processes, config.model)
    if section.context > 1:
        note += f"; {section.context} processes share each row"
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
        context=section.context,
    )
    return parallel, note


class TrainSetup:
    """Model, optimizer and data of a run, in one process of it; nothing is written.

    A run that `begins` takes the weights that `model.from` names, if any. `config` gets the commit of the data that the
    loader found, which the saved one names. `parallel` is the model as it is trained, `notes` are sentences for the
    log, and `interrupted` says whether to wait for validation text no longer. Raises UserError, in every process, if
    the data fail in any, or the weights.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        processes: DistributedContext,
        tokenizer: Tokenizer,
        *,
        begins: bool = True,
    ) -> None:
        self.config, self.directory, self.tokenizer = config, directory, tokenizer
        self.processes, self.device = processes, processes.device
        self.state = TrainState()
        self.notes: list[str] = []
        self.interrupted: Callable[[], bool] = lambda: False
        self._validation_batches: list[Batch] = []
        self._random_state: dict[str, object] | None = None
        seed_everything(config.run.seed)
        self.model = self._make_model(begins)
        self.parallel, mode_note = parallelize_model(self.model, config, processes)
        self.optimizer = make_optimizer(self.model, config.optimizer)
        if config.train.compile:
            self.model.compile_training()
        self.teacher: ChoiceTeacher | None = None
        self.distillation: Distillation | None = None
        given: dict[str, Any] = {}
        if config.train.choice_weight(config.model):
            # Where gradients are exchanged after backward they are added up, elsewhere averaged over the processes.
            factor = self.parallel.size if self.parallel.flat_gradients is None else 1
            self.teacher = ChoiceTeacher(self.model, config.train, self.device, factor)
            given["teaching"] = self.teacher.teaching
        if config.distill.from_:
            given["distillation"] = self.distillation = processes.run_on_all(self._make_distillation)
        self.loss_function: LossFunction = partial(self.parallel.module, **given) if given else self.parallel.module
        self.graphs, graphs_note = make_graphs(self.parallel, self.model, config.train, self.device, self.loss_function)
        self.loader = processes.run_on_all(self._make_loader)
        self.state.data_position = self.loader.state_dict()
        self.config = replace(config, data=self.loader.config)
        data = self.loader.describe()
        self.notes += filter(None, [mode_note, graphs_note, f"reads {data}" if data else ""])
        if config.evaluate.interval_steps and (config.data.is_local or not config.data.validation_fraction):
            # Data without validation text are refused now, not after hours of training.
            self.validation_batches()

    def _make_model(self, begins: bool) -> DecoderLM:
        """The model on its device, with its first weights."""
        config = self.config
        model = meta_model(config.model)
        model.to_empty(device=self.device)
        model.init_weights(config.run.seed)
        if begins and config.model.from_:
            changed = self.processes.run_on_all(lambda: load_pretrained_weights(model, config.model.from_))
            self.notes.append("; ".join([f"begins with the weights of {config.model.from_}", *changed]))
        freeze(model, config.train.only)
        model.set_activation_checkpointing(*config.train.checkpointed_layers(config.model.num_layers))
        return model

    def _make_distillation(self) -> Distillation:
        """The frozen model of `distill.from`, all of it in each process."""
        section = self.config.distill
        frozen = load_frozen(section.from_, self.config.model.vocab_size, self.tokenizer, self.device)
        self.notes.append(f"learns the distribution of {section.from_}")
        return Distillation(frozen, section.text_weight, torch.zeros((), device=self.device))

    def _make_loader(self) -> Loader:
        """The loader of this process's rows; processes that share sequences get the same ones."""
        config = self.config
        groups = config.parallel.groups(self.processes.size)
        return Loader(
            config.data,
            tokenizer=self.tokenizer,
            sequence_length=config.train.sequence_length,
            batch_size=config.train.sequences_at_once(groups),
            vocab_size=config.model.vocab_size,
            rank=self.processes.rank // config.parallel.context,
            world_size=groups,
            local_tokens=self.local_tokens,
            change_row=change_step(config) * config.train.global_batch_size,
        )

    @property
    def local_tokens(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Takes this process's part of rows that it shares; None where it has its own rows."""
        return None if self.model.context is None else self.model.context.local_tokens

    def restore(self, checkpoint: Path) -> None:
        """Load a checkpoint: weights, optimizer, position in the data, counters, random generators."""
        saved = load_checkpoint(
            checkpoint,
            model=self.model,
            optimizer=self.optimizer,
            model_config=self.config.model,
            processes=self.processes,
        )
        step, last = saved["step"], self.config.train.steps
        if step > last:
            raise UserError(
                f"{checkpoint} is from step {step}, past train.steps {last}; raise --train.steps, or take an earlier "
                "one with --checkpoint"
            )
        try:
            self.loader.load_state_dict(saved["data"])
            # The batch may be another than in the steps before.
            steps = change_step(self.config) - step
            self.loader.change_row = saved["data"]["sample_index"] + steps * self.config.train.global_batch_size
            self.state = TrainState(step, step, saved["loss"], saved["data"])
            # Here to see that it can be read; the start draws from the generators before the first step.
            restore_random_state(saved["random"])
        except UserError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            # The file is intact, the content is not.
            what = f"{type(error).__name__}: {one_line(error)}"
            raise UserError(
                f"the position in {checkpoint} cannot be read ({what}); continue from another one with --checkpoint"
            ) from error
        self._random_state = saved["random"]

    def validation_batches(self) -> list[Batch]:
        """The batches of all evaluations, read once; all processes call this, and all fail where one does."""
        if not self._validation_batches:
            self._validation_batches = self.processes.run_on_all(self._read_validation_batches)
        return self._validation_batches

    def _read_validation_batches(self) -> list[Batch]:
        """The batches; none if the wait for them is interrupted. A source may also be slow to open."""
        reading = in_thread(
            partial(read_validation_batches, self.config, self.tokenizer, self.local_tokens), "validation"
        )
        while not reading.done():
            if self.interrupted():
                return []
            futures.wait([reading], LOOK_SECONDS)
        return reading.result()

    def restore_random_state(self) -> None:
        """Restore the random generators of the checkpoint, right before the first step: the start draws from them."""
        if self._random_state is not None:
            restore_random_state(self._random_state)
