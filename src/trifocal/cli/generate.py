"""`trifocal generate`: continue a text, or a file of them, with a trained model."""

import sys
from collections.abc import Sequence

from trifocal.cli.flags import parse_arguments
from trifocal.cli.generate_file import generate_file
from trifocal.cli.generate_model import GenerateArguments, LoadedModel, load
from trifocal.cli.output import printable
from trifocal.cli.threads import Threads
from trifocal.errors import UserError
from trifocal.inference import Completion, Engine
from trifocal.inference.prompts import memory_errors
from trifocal.train.checkpoint.pretrained import pretrained_path
from trifocal.train.config.check import choose_device


def run(args: Sequence[str]) -> int:
    """Print continuations, the first while it is made; or write those of a file."""
    options: GenerateArguments = parse_arguments(GenerateArguments, args, prog="trifocal generate")
    path = pretrained_path(options.path, "PATH")
    if options.prompts:
        return generate_file(options, path)
    prompt = _read_prompt(options.prompt)
    threads = Threads(choose_device(options.device))
    loaded = load(options, path, [("the prompt", prompt)])
    with memory_errors(loaded.model.device):
        _print_continuations(loaded, options, "" if options.chat else prompt, threads)
    return 0


def _read_prompt(text: str) -> str:
    name = "--prompt"
    try:
        if text == "-":
            name = "standard input"
            text = sys.stdin.buffer.read().decode("utf-8")
        text.encode("utf-8")
    except UnicodeError as error:
        raise UserError(f"{name} is not UTF-8 text") from error
    if not text:
        raise UserError(f"{name} is empty: give the model something to continue")
    return text


def _print_continuations(loaded: LoadedModel, options: GenerateArguments, prompt: str, threads: Threads) -> None:
    def show(text: str) -> None:
        # A terminal would obey what a model writes; a file gets it as it is.
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()

    def head(index: int) -> str:
        return (f"--- {index + 1} of {options.samples}\n" if options.samples > 1 else "") + prompt

    def tail(completion: Completion) -> str:
        if not options.logprobs:
            return "\n"
        pairs = zip(completion.tokens, completion.log_probabilities, strict=True)
        return "\n" + "".join(f"{log_p:9.4f} {loaded.tokenizer.token_text(token)!r}\n" for token, log_p in pairs)

    request = loaded.request(options, 0, "the prompt")
    started = False
    completions: dict[int, Completion] = {}
    threads.say()
    try:
        for update in Engine(loaded.model, loaded.tokenizer).run([request]):
            if update.token is None:
                raise UserError(
                    f"{loaded.path}: the model's output is not finite: its weights are broken; choose an earlier "
                    "checkpoint"
                )
            if update.sample == 0:
                show(update.text if started else head(0) + update.text)
                started = True
            threads.say()
            if update.completion is not None:
                completions[update.sample] = update.completion
    finally:
        if started:
            show(tail(completions[0]) if 0 in completions else "\n")
    for index in range(1, options.samples):
        show(head(index) + completions[index].text + tail(completions[index]))
