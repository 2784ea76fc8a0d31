"""Measurements beside training: the loss on held-out text, the attention, samples of generated text."""

from trifocal.data import Batch
from trifocal.telemetry import AttentionTelemetry
from trifocal.train.run_logger import RunLogger
from trifocal.train.setup import TrainSetup
from trifocal.train.step.micro_batch import autocast
from trifocal.train.validation_loss import (
    Evaluation,
    ShownSequence,
    evaluate,
    read_validation_batches,
    sample,
    sequence_to_show,
)


class Evaluator:
    """Evaluates the model of a run, measures its attention and samples from it.

    A sharded model needs all processes for attention and samples; with any other, rank 0 does both alone.

    Args:
        setup: The run.
        log: Its `write_optional` writes pictures and samples.
    """

    def __init__(self, setup: TrainSetup, log: RunLogger) -> None:
        self._config, self._directory, self._tokenizer = setup.config, setup.directory, setup.tokenizer
        self._processes, self._device, self._model = setup.processes, setup.device, setup.model
        self._takes_part = setup.processes.is_rank0 or setup.parallel.sharded
        self._log = log
        self._telemetry = AttentionTelemetry(setup.model)
        self._batches: list[Batch] | None = None
        self._shown: ShownSequence | None = None
        self.has_telemetry = bool(self._telemetry.layers)
        """Whether the model has attention layers to measure."""

    def read_validation_text(self) -> None:
        """Read the batches of all evaluations, once.

        Raises:
            UserError: In every process, if the data fail in any.
        """
        if self._batches is None:
            self._batches = self._processes.run_on_all(lambda: read_validation_batches(self._config, self._tokenizer))

    def evaluate(self) -> Evaluation:
        """Compute the loss on the validation batches, which were read before; all processes call this."""
        batches, progress = self._batches, self._log.progress
        assert batches is not None
        return evaluate(
            self._model,
            batches,
            tokenizer=self._tokenizer,
            data=self._config.data,
            device=self._device,
            precision=self._config.train.precision,
            processes=self._processes,
            on_batch=lambda done: progress.activity("evaluating", done, len(batches)),
        )

    def measure_attention(self, step: int, batch: Batch) -> None:
        """Write gates and chosen blocks of the first sequence of a batch as rows of the metrics."""
        if not self._takes_part:
            return
        tokens = batch.tokens[:1].to(self._device)
        with autocast(self._device, self._config.train.precision):
            self._telemetry.log(self._log.metrics, step, tokens, cu_seqlens=batch.cu_seqlens)

    def picture_attention(self, step: int) -> None:
        """Write the attention of each branch on one validation sequence, always the same one, into `attention/`."""
        if self._batches is None or not self._takes_part:
            return
        if self._shown is None:
            self._shown = sequence_to_show(self._batches, self._tokenizer)
        tokens, cu_seqlens, texts = self._shown
        with autocast(self._device, self._config.train.precision):
            picture = self._telemetry.picture(step, tokens.to(self._device), texts, cu_seqlens=cu_seqlens)
        path = self._directory / "attention" / f"step_{step:08d}.npz"
        self._log.write_optional("attention picture", lambda: picture.save(path))

    def sample(self, step: int) -> str | None:
        """Continue the configured prompt, and write the text into `samples/`.

        Returns:
            The text; None in a process that takes no part.
        """
        if not self._takes_part:
            return None
        text = sample(
            self._model,
            tokenizer=self._tokenizer,
            config=self._config.log,
            seed=self._config.run.seed,
            device=self._device,
            precision=self._config.train.precision,
        )
        folder = self._directory / "samples"

        def write() -> None:
            folder.mkdir(exist_ok=True)
            (folder / f"step_{step:08d}.txt").write_text(text + "\n", encoding="utf-8")

        self._log.write_optional("sample", write)
        return text
