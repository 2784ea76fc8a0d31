"""The training loop: one trainer, for every device and every run."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from trifocal.runlog.environment import write_backends
from trifocal.runlog.traces.tracer import Tracer
from trifocal.train.checkpoint.export import STEP_FILE, WEIGHTS, weights_step
from trifocal.train.checkpoint.folders import delete_later
from trifocal.train.coordinator import StepCoordinator, StepData
from trifocal.train.evaluator import Evaluator
from trifocal.train.nonfinite import FiniteGuard
from trifocal.train.out_of_memory import memory_remedies, remedies_on_out_of_memory
from trifocal.train.run_folder import save_config
from trifocal.train.run_logger import RunLogger, open_logger
from trifocal.train.saving import Saver
from trifocal.train.setup import TrainSetup
from trifocal.train.step.optimizer import set_learning_rate
from trifocal.train.step.schedule import is_due, last_stable_step, learning_rate
from trifocal.train.step.step import StepResult, TrainStep
from trifocal.train.stop import StoppedBeforeFirstStep, StopSignals
from trifocal.train.validation_loss import Evaluation

BeforeStep = Callable[[], str]


@dataclass(frozen=True)
class TrainResult:
    """The end of a run.

    Attributes:
        directory: The run.
        step: Optimizer steps done.
        finished: Whether all steps are done; False after an interruption.
        loss: The last training loss that was logged, nats per token.
        evaluation: The last evaluation of this process.
        sample: The last sample of this process.
        is_rank0: Whether this is rank 0, which prints the result.
        skipped_documents: Bad documents that all processes skipped, each counted once.
        stop_requested: Whether a signal asked to stop; one in the last step leaves no step out.
    """

    directory: Path
    step: int
    finished: bool
    loss: float | None
    evaluation: Evaluation | None
    sample: str | None
    is_rank0: bool = True
    skipped_documents: int = 0
    stop_requested: bool = False


def deterministic_operations(stack: ExitStack) -> None:
    """Until the stack is closed, operations give equal bits for equal inputs, or raise where a GPU cannot."""
    # cuBLAS reads it at its first use: with more workspaces, sums could run in another order.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
    torch.use_deterministic_algorithms(True)
    # A debugging aid that costs a pass over every new tensor.
    settings, fills = torch.utils.deterministic, "fill_uninitialized_memory"
    stack.callback(setattr, settings, fills, getattr(settings, fills))
    setattr(settings, fills, False)


def make_tracer(setup: TrainSetup, log: RunLogger) -> Tracer:
    """Make the tracer that `config.trace` asks for, which may be one that does nothing; the log takes its events."""
    config, step = setup.config, setup.state.step
    names, windows = config.trace.names(), config.trace.windows()
    interval, total = config.trace.interval_steps, config.train.steps
    by_interval = interval > 0 and step // interval < total // interval
    if names and not by_interval and all(end <= step + 1 or first > total for first, end in windows):
        given = f'trace.steps "{config.trace.steps}"' + (f" and trace.interval_steps {interval}" if interval else "")
        log.log_event("note", f"{given}: no step of this run is among them, and nothing is traced", "warning")
    if "exchange" in names and setup.parallel.watch is None:
        log.log_event("note", 'trace.what "exchange" has no effect: there is one process', "warning")
    return Tracer(
        setup.directory,
        names,
        windows,
        interval_steps=interval,
        model=setup.model,
        parallel=setup.parallel,
        optimizer=setup.optimizer,
        device=setup.device,
        rank=setup.processes.rank,
        phases=log.heartbeat,
        report=lambda name, sentence: log.log_event(name, sentence, "info" if name == "traced" else "warning"),
    )


def run_training(
    setup: TrainSetup, notes: list[str], checkpoint: Path | None, before_step: BeforeStep | None
) -> TrainResult:
    """Train to the last step or the first signal, as `trifocal.train.train`, in a folder that exists."""
    with ExitStack() as stack:
        stack.enter_context(remedies_on_out_of_memory(*memory_remedies(setup.config, setup.processes.size)))
        stack.callback(setup.loader.close)
        if setup.config.run.deterministic:
            deterministic_operations(stack)
        if checkpoint is not None:
            setup.restore(checkpoint)
        log = open_logger(setup, stack)
        signals = stack.enter_context(StopSignals(log.watchdog.ask))
        if setup.graphs is not None:
            stack.callback(setup.graphs.release)
        coordinator = StepCoordinator(setup.processes, signals, setup.teacher, setup.config.parallel.context)
        setup.interrupted = setup.loader.interrupted = coordinator.stop_requested
        silence = setup.config.parallel.silence_seconds
        stack.enter_context(coordinator.watched(log.heartbeat, silence, log.event))
        try:
            with signals.as_stop_request():
                return Trainer(setup, log, coordinator, signals, before_step).run(notes)
        except StoppedBeforeFirstStep:
            setup.state.step = setup.state.resume_step or 0
            log.heartbeat.close("stopped")
            raise


class Trainer:
    """The loop of one run, in one process of it; arguments as of `run_training`, its setup restored."""

    def __init__(
        self,
        setup: TrainSetup,
        log: RunLogger,
        coordinator: StepCoordinator,
        signals: StopSignals,
        before_step: BeforeStep | None,
    ) -> None:
        self.setup, self.log, self.coordinator, self.signals = setup, log, coordinator, signals
        self.config, self.state, self.processes = setup.config, setup.state, setup.processes
        self.before_step = before_step
        self.guard = FiniteGuard(setup, log)
        self.saver = Saver(setup, log, self.guard)
        self.evaluator = Evaluator(setup, log, coordinator)
        self.evaluation: Evaluation | None = None
        self.sample: str | None = None
        train = self.config.train
        self.generates_code = train.compile or setup.graphs is not None
        # Code is made for one kind of micro-batch: text is packed even where no document ends inside of a row. A second
        # kind would be compiled at some later step, beside the first one's memory.
        self.fewest_documents = int(self.config.data.has_text)
        groups = self.config.parallel.groups(setup.processes.size)
        self.accumulation = train.global_batch_size // (train.sequences_at_once(groups) * groups)
        self.train_step = TrainStep(
            setup.loss_function,
            setup.optimizer,
            setup.device,
            train,
            before_backward=self.guard.check_step,
            parallel=setup.parallel,
            graphs=setup.graphs,
            teacher=setup.teacher,
            distillation=setup.distillation,
        )
        self.tracer = make_tracer(setup, log)

    def run(self, notes: list[str]) -> TrainResult:
        """Train to the last step or the first signal; `run_training` has the rest."""
        setup, state, log, total = self.setup, self.state, self.log, self.config.train.steps
        log.introduce(setup)
        for note in [*notes, *setup.notes]:
            log.log_event("note", note)
        with self.tracer, self.saver.written_on_error():
            log.heartbeat.update(step=state.step)
            # From here on the random generators are where the checkpoint left them.
            setup.restore_random_state()
            while state.step < total and self._take_step():
                pass
            if state.steps_here == 0:
                self._commit_start()
            self.saver.end()
            skipped = set().union(*self.processes.gather(setup.loader.bad_documents.skipped))
            finished = state.step >= total
            if not finished:
                log.heartbeat.close("stopped")
        return TrainResult(
            setup.directory,
            state.step,
            finished,
            state.loss,
            self.evaluation,
            self.sample,
            self.processes.is_rank0,
            len(skipped),
            self.signals.received is not None,
        )

    def _take_step(self) -> bool:
        """Take a step, and log, evaluate and save where due; False if all processes are to stop before the step."""
        step, setup = self.state.step + 1, self.setup
        last = step == self.config.train.steps
        if self.before_step is not None and (sentence := self.before_step()):
            self.log.log_event("threads", sentence)
        with self.saver.ended_on_error():
            data = self.coordinator.next_step(setup.loader, self.accumulation, self.log.heartbeat, step=step, last=last)
        if data is None:
            return False
        if self.state.steps_here == 0:
            self.log.log_first_batch()
        result = self._update(step, data)
        self.guard.add(result)
        self.state.step, self.state.data_position = step, data.position
        self.log.heartbeat.update(step=step)
        self._after_step(result, last=last)
        return True

    def _update(self, step: int, data: StepData) -> StepResult:
        """Forward, backward and update."""
        set_learning_rate(self.setup.optimizer, learning_rate(self.config, step))
        if self.generates_code:
            documents = [max(number, self.fewest_documents) for number in data.documents]
        else:
            documents = [batch.packed_documents for batch in data.batches]
        with self._compile_notes(step) as forward_phase, self.tracer.step(step) as phases:
            return self.train_step.run(
                step,
                data.batches,
                phases=phases,
                forward_phase=forward_phase,
                total_targets=data.total_targets,
                documents=documents,
                eligible=data.eligible,
            )

    @contextmanager
    def _compile_notes(self, step: int) -> Iterator[str]:
        """Note in the log that the first step compiles; yields its forward phase's name, "compile" or "forward"."""
        if not self.generates_code or self.state.steps_here:
            yield "forward"
            return
        takes = "about half a minute, less once its caches are filled"
        self.log.log_event("compiling", f"step {step} compiles the model, which takes {takes}")
        begin = time.perf_counter()
        yield "compile"
        self.log.log_event("compiled", f"step {step} compiled in {time.perf_counter() - begin:.0f} s")

    def _after_step(self, result: StepResult, *, last: bool) -> None:
        """Log, evaluate, sample and save where it is due; each of them first checks that the step was finite."""
        config, step, log = self.config, self.state.step, self.log
        first_here = self.state.steps_here == 1
        if first_here:
            self.guard.check_step()
            self._commit_start()
        if last or first_here:
            path = self.setup.directory / "backends.json"
            log.write_optional("choice of backends", lambda: write_backends(path))
        if last or step == 1 or step % config.log.interval_steps == 0:
            self.guard.check_step()
            log.log_step(result)
        with self.saver.ended_on_error():
            self._evaluate(result, last=last)
        self.saver.report_written()
        stable = step == last_stable_step(config)
        if stable or is_due(step, config.checkpoint.interval_steps, last):
            self.saver.save(must_succeed=last)

    def _evaluate(self, result: StepResult, *, last: bool) -> None:
        """Evaluate, measure the attention and sample, where due, until a process is to stop: each then ends soon."""
        config, step, evaluator = self.config, self.state.step, self.evaluator
        evaluates = is_due(step, config.evaluate.interval_steps, last)
        pictures = evaluates and evaluator.has_telemetry and config.log.telemetry_interval_steps
        measures = evaluator.has_telemetry and is_due(step, config.log.telemetry_interval_steps, last)
        samples = is_due(step, config.log.sample_interval_steps, last)

        def evaluate() -> None:
            self.evaluation = evaluator.evaluate()
            if self.evaluation is not None:
                self.log.log_evaluation(self.evaluation)

        def sample() -> None:
            self.sample = evaluator.sample(step)

        for due, phase, work in (
            (evaluates, "evaluate", evaluate),
            (pictures, "telemetry", lambda: evaluator.picture_attention(step)),
            (measures, "telemetry", lambda: evaluator.measure_attention(step, result.batches[0])),
            (samples, "sample", sample),
        ):
            if due and not self.coordinator.agree_to_stop():
                self.guard.check_step()
                with self.log.pause(phase):
                    work()

    def _commit_start(self) -> None:
        """Note that the first step has ended in all processes: from now on a signal saves. A resume changes the run's
        configuration and checkpoints only now: one that fails leaves them as they were.
        """
        directory, processes, resume_step = self.setup.directory, self.processes, self.state.resume_step
        with self.log.heartbeat.phase("wait"):
            processes.raise_on_all(None)
        self.signals.something_to_save = True
        if resume_step is None:
            return

        def commit() -> None:
            self.saver.check_directory()
            save_config(self.config, directory)
            delete_later(directory, resume_step)
            if (weights_step(directory / WEIGHTS) or 0) > resume_step:
                # This run will have another model of that step.
                (directory / WEIGHTS / STEP_FILE).unlink()

        with self.log.pause("checkpoint"):
            processes.run_on_rank0(commit)
        if (directory / WEIGHTS).is_dir() and self.state.step < self.config.train.steps:
            self.log.log_event("note", f"{directory / WEIGHTS} has an earlier step until this run ends")
