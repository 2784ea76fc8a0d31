"""`trifocal generate --prompts FILE.jsonl --output OUT.jsonl`: many prompts at a time."""

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

from trifocal.cli.generate_model import GenerateArguments, load
from trifocal.errors import UserError
from trifocal.inference import Engine
from trifocal.inference.prompt_file import OrderedWriter, PromptLine, count_written, open_output, read_prompts
from trifocal.inference.prompts import memory_errors
from trifocal.paths import user_path

# Seconds between lines of progress.
_INTERVAL_SECONDS = 10.0


def generate_file(options: GenerateArguments, path: Path) -> int:
    """Continue every prompt of a file.

    Returns:
        0, or 1 if sequences ended because the model's output was not finite.

    Raises:
        UserError: If a line of the prompts is broken or too long, the output exists or cannot be written, or as `load`.
    """
    source, output = user_path(options.prompts, "--prompts"), user_path(options.output, "--output")
    prompts = read_prompts(source)
    if output.exists() and output.samefile(source):
        raise UserError(f"--output {output} is the file of the prompts; choose another")
    written = [0] * len(prompts)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_output(output, append=options.append))
        if options.append:
            written = count_written(output, prompts, options.samples)
        else:
            # A start that fails leaves no empty file in the way of the next.
            stack.callback(lambda: None if os.fstat(file.fileno()).st_size else output.unlink(missing_ok=True))
        left = [number for number, count in enumerate(written) if count < options.samples]
        if len(left) < len(prompts):
            print(f"{output} has the texts of {len(prompts) - len(left):,} prompts", file=sys.stderr)
        if not left:
            return 0
        return _generate(options, path, output, file, prompts, written)


def _generate(
    options: GenerateArguments,
    path: Path,
    output: Path,
    file: FileIO,
    prompts: Sequence[PromptLine],
    written: Sequence[int],
) -> int:
    # A prompt that has some of its samples makes all of them again, with the same tokens.
    left = [number for number, count in enumerate(written) if count < options.samples]
    loaded = load(options, path, [(prompts[number].name, prompts[number].prompt) for number in left])
    requests = [
        loaded.request(options, index, prompts[number].name, number=number) for index, number in enumerate(left)
    ]
    number_of = {id(request): number for request, number in zip(requests, left, strict=True)}
    broken, tokens, done = [], 0, 0
    begin = said = time.monotonic()

    def progress() -> str:
        rate = tokens / (time.monotonic() - begin)
        return f"{done:,} of {len(requests) * options.samples:,} sequences, {tokens:,} tokens, {rate:,.0f} tokens/s"

    with memory_errors(loaded.model.device):
        writer = OrderedWriter(file, output, prompts, options.samples, written, log_probabilities=options.logprobs)
        for update in Engine(loaded.model, loaded.tokenizer).run(requests):
            tokens += update.token is not None
            if update.completion is not None:
                done += 1
                writer.add(number_of[id(update.request)], update.completion)
                if update.completion.finish_reason == "error":
                    broken.append(update.request.name)
            if time.monotonic() - said > _INTERVAL_SECONDS:
                said = time.monotonic()
                print(progress(), file=sys.stderr, flush=True)
    print(f"{output}: {progress()}", file=sys.stderr)
    for name in broken:
        print(f"{name}: the model's output is not finite; its text ends there", file=sys.stderr)
    return int(bool(broken))
