"""`trifocal generate --prompts FILE.jsonl --output OUT.jsonl`: many prompts at a time."""

import sys
import time
from pathlib import Path

from rich.console import Console
from rich.status import Status

from trifocal.cli.generate_model import load, memory_errors
from trifocal.cli.generate_options import GenerateArguments
from trifocal.errors import UserError
from trifocal.generate import Engine
from trifocal.generate.prompt_file import (
    OrderedWriter,
    check_settings,
    count_finished,
    open_output,
    read_prompts,
    write_settings,
)
from trifocal.paths import user_path

# Seconds between lines of progress where there is no terminal.
_INTERVAL_SECONDS = 10.0


def generate_file(options: GenerateArguments, path: Path, command: str) -> int:
    """Continue every prompt of a file.

    Returns:
        0, or 1 if sequences ended because the model's output was not finite.

    Raises:
        UserError: If a line of the prompts is broken or too long, the output is of other prompts or made with other
            settings, or as `load`.
    """
    source, output = user_path(options.prompts, "--prompts"), user_path(options.output, "--output")
    prompts = read_prompts(source)
    if output.exists() and output.samefile(source):
        raise UserError(f"--output {output} is the file of the prompts; choose another")
    finished = count_finished(output, prompts, options.samples)
    # A prompt that has some of its samples makes all of them again, with the same tokens.
    first = finished // options.samples
    if finished:
        check_settings(output, options.settings())
    if first == len(prompts):
        print(f"{output} has all of its {finished:,} lines", file=sys.stderr)
        return 0
    left = prompts[first:]
    loaded = load(options, path, command, [(prompt.name, prompt.prompt) for prompt in left])
    weights = {"weights": str(loaded.path.resolve())}
    if finished:
        check_settings(output, weights)
        print(f"{output} has {finished:,} lines; going on behind them", file=sys.stderr)
    else:
        write_settings(output, options.settings() | weights)
    requests = [loaded.request(options, index, prompt.name, number=first + index) for index, prompt in enumerate(left)]
    number_of = {id(request): first + index for index, request in enumerate(requests)}
    broken = []
    with (
        open_output(output) as file,
        _Progress(len(requests) * options.samples) as progress,
        memory_errors(loaded.model.device),
    ):
        writer = OrderedWriter(file, prompts, options.samples, finished, log_probabilities=options.logprobs)
        for update in Engine(loaded.model, loaded.tokenizer).run(requests):
            completion = update.completion
            if completion is not None:
                writer.add(number_of[id(update.request)], completion)
                if completion.finish_reason == "error":
                    broken.append(update.request.name)
            progress.count(update.token is not None, completion is not None)
    print(f"{output}: {progress.summary()}", file=sys.stderr)
    for name in broken:
        print(f"{name}: the model's output is not finite; its text ends there", file=sys.stderr)
    return int(bool(broken))


class _Progress:
    """Sequences, tokens and tokens a second, on a terminal in one line that changes, elsewhere a line now and then."""

    def __init__(self, total: int) -> None:
        self._total, self._tokens, self._done = total, 0, 0
        self._begin = self._said = time.monotonic()
        console = Console(stderr=True)
        self._status = Status("", console=console) if console.is_terminal else None

    def __enter__(self) -> "_Progress":
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def count(self, token: bool, done: bool) -> None:
        """Count a token and a finished sequence."""
        self._tokens += token
        self._done += done
        now = time.monotonic()
        if now - self._said < (0.2 if self._status is not None else _INTERVAL_SECONDS):
            return
        self._said = now
        if self._status is not None:
            self._status.update(self.summary())
        else:
            print(self.summary(), file=sys.stderr, flush=True)

    def summary(self) -> str:
        """What is done so far."""
        seconds = time.monotonic() - self._begin
        rate = self._tokens / seconds if seconds else 0.0
        return f"{self._done:,} of {self._total:,} sequences, {self._tokens:,} tokens, {rate:,.0f} tokens/s"
