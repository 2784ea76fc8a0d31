"""Measurements beside training: the loss on held-out text, the attention, samples of generated text."""

from contextlib import suppress
from itertools import pairwise

import torch

from trifocal.data import Batch
from trifocal.data.prefetch import Stopped
from trifocal.inference import CachedModel, Engine, Request, Sampling
from trifocal.telemetry.attention_telemetry import AttentionTelemetry
from trifocal.train.coordinator import StepCoordinator
from trifocal.train.run_logger import RunLogger
from trifocal.train.setup import TrainSetup
from trifocal.train.step.micro_batch import autocast
from trifocal.train.validation_loss import Evaluation, evaluate

SAMPLE_TEMPERATURE = 0.8


class Evaluator:
    """Evaluates a run's model, measures its attention and samples; the latter two in rank 0, unless it is sharded."""

    def __init__(self, setup: TrainSetup, log: RunLogger, coordinator: StepCoordinator) -> None:
        self._config, self._directory, self._tokenizer = setup.config, setup.directory, setup.tokenizer
        self._processes, self._device, self._model = setup.processes, setup.device, setup.model
        self._takes_part = setup.processes.is_rank0 or setup.parallel.sharded
        self._setup, self._log, self._coordinator = setup, log, coordinator
        self._telemetry = AttentionTelemetry(setup.model)
        self.has_telemetry = bool(self._telemetry.layers)
        """Whether the model has attention layers to measure."""

    def evaluate(self) -> Evaluation | None:
        """The loss on the validation batches, from all processes; None, in all of them, if the run is to stop."""
        batches = self._setup.validation_batches()

        def on_batch(done: int) -> None:
            self._log.progress.activity("evaluating", done, len(batches))
            if self._coordinator.agree_to_stop():
                raise Stopped

        if self._coordinator.agree_to_stop():
            return None
        with suppress(Stopped):
            return evaluate(
                self._model,
                batches,
                tokenizer=self._tokenizer,
                data=self._config.data,
                device=self._device,
                precision=self._config.train.precision,
                processes=self._processes,
                on_batch=on_batch,
            )
        return None

    def measure_attention(self, step: int, batch: Batch) -> None:
        """Write gates and chosen blocks of the first sequence of a batch as rows of the metrics."""
        if not self._takes_part:
            return
        tokens = batch.rows[:1].to(self._device)
        with autocast(self._device, self._config.train.precision):
            self._telemetry.log(self._log.metrics, step, tokens, cu_seqlens=batch.cu_seqlens)

    def picture_attention(self, step: int) -> None:
        """Write the attention on one validation sequence, always that with the longest document, into `attention/`."""
        if not self._takes_part:
            return
        rows = []
        for batch in self._setup.validation_batches():
            num_rows, length = batch.rows.shape
            boundaries = [] if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
            for row in range(num_rows):
                inside = [at - row * length for at in boundaries if row * length < at < (row + 1) * length]
                rows.append((batch.rows[row], inside))
        tokens, inside = max(rows, key=lambda row: max(b - a for a, b in pairwise([0, *row[1], len(row[0])])))
        cu_seqlens = torch.tensor([0, *inside, len(tokens)], dtype=torch.int32) if inside else None
        end = self._tokenizer.separator
        texts = ["∎" if token == end else self._tokenizer.token_text(token) for token in tokens.tolist()]
        with autocast(self._device, self._config.train.precision):
            picture = self._telemetry.picture(step, tokens[None].to(self._device), texts, cu_seqlens=cu_seqlens)
        path = self._directory / "attention" / f"step_{step:08d}.npz"
        self._log.write_optional("attention picture", lambda: picture.save(path))

    def sample(self, step: int) -> str | None:
        """Continue the configured prompt, always with the same seed, into `samples/`; None elsewhere, and at a stop."""
        if not self._takes_part:
            return None
        config, tokenizer = self._config, self._tokenizer
        stop = self._coordinator.agree_to_stop if self._setup.parallel.sharded else self._coordinator.stop_requested
        request = Request(
            prompt=tokenizer.encode_prompt(config.log.sample_prompt),
            max_new_tokens=config.log.sample_tokens,
            sampling=Sampling(temperature=SAMPLE_TEMPERATURE, seed=config.run.seed),
            stop_tokens=(tokenizer.separator,),
        )
        tokens: list[int] = []
        with autocast(self._device, config.train.precision):
            cached = CachedModel(self._model, max_sequences=1, max_length=request.longest)
            for update in Engine(cached).run([request]):
                if update.token is None:
                    raise FloatingPointError("the model's output is not finite: its weights are broken")
                tokens.append(update.token)
                if stop():
                    return None
        text = config.log.sample_prompt + tokenizer.decode(tokens)
        folder = self._directory / "samples"

        def write() -> None:
            folder.mkdir(exist_ok=True)
            (folder / f"step_{step:08d}.txt").write_text(text + "\n", encoding="utf-8")

        self._log.write_optional("sample", write)
        return text
