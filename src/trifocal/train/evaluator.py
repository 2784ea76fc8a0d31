"""What a run looks at beside training: the loss on held-out text, the attention, samples of what the model writes."""

from collections.abc import Callable
from pathlib import Path

from trifocal.data import Batch, Tokenizer
from trifocal.distributed import Parallel, Processes
from trifocal.models import DecoderLM
from trifocal.runlog import MetricsWriter
from trifocal.telemetry import AttentionTelemetry
from trifocal.train.evaluate import (
    Evaluation,
    ShownSequence,
    evaluate,
    read_validation_batches,
    sample,
    sequence_to_show,
)
from trifocal.train.micro_batch import autocast
from trifocal.train.run_config import RunConfig


class Evaluator:
    """Evaluator at the model of a run. A sharded model takes all processes for that, any other rank 0 alone.

    Args:
        config: The run.
        directory: Of the run.
        tokenizer: Of its data.
        processes: This process among those of the run.
        model: Looked at.
        parallel: The model as it is trained.
        keep: Called with what is written and the call that writes it; says if that fails.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        tokenizer: Tokenizer,
        processes: Processes,
        *,
        model: DecoderLM,
        parallel: Parallel,
        keep: Callable[[str, Callable[[], None]], None],
    ) -> None:
        self._config, self._directory, self._tokenizer = config, directory, tokenizer
        self._processes, self._device, self._model = processes, processes.device, model
        self._takes_part = processes.is_rank0 or parallel.sharded
        self._keep = keep
        self._telemetry = AttentionTelemetry(model)
        self._batches: list[Batch] | None = None
        self._shown: ShownSequence | None = None
        self.has_telemetry = bool(self._telemetry.layers)
        """Whether the model has attention that can be looked into."""

    def read_validation_text(self) -> None:
        """Read the batches of all evaluations, once.

        Raises:
            UserError: In every process, if the data fail in any.
        """
        if self._batches is None:
            self._batches = self._processes.run_on_all(lambda: read_validation_batches(self._config, self._tokenizer))

    def evaluate(self) -> Evaluation:
        """The loss on the validation batches, which were read before; all processes call this."""
        assert self._batches is not None
        return evaluate(
            self._model,
            self._batches,
            tokenizer=self._tokenizer,
            data=self._config.data,
            device=self._device,
            precision=self._config.train.precision,
            processes=self._processes,
        )

    def measure_attention(self, step: int, batch: Batch, metrics: MetricsWriter) -> None:
        """Gates and chosen blocks of the first sequence of a batch, as rows of the metrics."""
        if not self._takes_part:
            return
        tokens = batch.tokens[:1].to(self._device)
        with autocast(self._device, self._config.train.precision):
            self._telemetry.log(metrics, step, tokens, cu_seqlens=batch.cu_seqlens)

    def picture_attention(self, step: int) -> None:
        """What each branch reads of one validation sequence, the same one each time, in a file of `attention/`."""
        if self._batches is None or not self._takes_part:
            return
        if self._shown is None:
            self._shown = sequence_to_show(self._batches, self._tokenizer)
        tokens, cu_seqlens, texts = self._shown
        with autocast(self._device, self._config.train.precision):
            picture = self._telemetry.picture(step, tokens.to(self._device), texts, cu_seqlens=cu_seqlens)
        self._keep("attention picture", lambda: picture.save(self._directory / "attention" / f"step_{step:08d}.npz"))

    def sample(self, step: int) -> str | None:
        """What the model makes of the configured prompt, also in a file of `samples/`; None where others sample."""
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

        self._keep("sample", write)
        return text
