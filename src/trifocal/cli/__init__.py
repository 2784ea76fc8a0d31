"""The command line. Each command is imported when it is called, so that `trifocal --help` answers at once."""

import contextlib
import errno
import importlib
import io
import os
import signal
import sys
import tempfile
from collections.abc import Sequence

from trifocal._version import __version__
from trifocal.cli.output import printable, replace_closed_streams
from trifocal.cli.threads import load_at_start
from trifocal.errors import UserError, unknown

COMMANDS = {
    "new": "print a commented configuration to begin with: PRESET > my.toml; without a name, list the presets",
    "train": "train a model: CONFIG [--section.key value …], or --resume RUN_DIR",
    "generate": "continue a text with a trained model: RUN_DIR --prompt TEXT",
    "serve": "serve a trained model to clients of OpenAI's completions, and a page to try it on: RUN_DIR",
    "convert": "make a sparse model of a dense one of Trifocal or Hugging Face: DIR OUT --to selected",
    "sparsify": "convert a dense model, train it to follow the dense one, and measure both: DIR OUT --data SOURCE",
    "evaluate": "measure a trained model: loss, needles, recall, RULER, bits per byte of a fixed set: RUN_DIR",
    "export": "write a trained model as a folder that transformers reads: RUN_DIR DIR",
    "check": "test this installation on this machine",
    "doctor": "examine this machine, measure two steps of CONFIG.toml here, and name the remedy of each fault",
    "report": "write one self-contained HTML page of a run: RUN_DIR",
    "watch": "show a run live in the terminal: RUN_DIR",
}

_DISK_ERRORS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS, errno.EPERM),
    *(errno.ENAMETOOLONG, errno.ENOTDIR, errno.EIO, errno.ESTALE, errno.EXDEV, errno.EBUSY, errno.EMFILE, errno.ENFILE),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. The exit status is 0, 1 if a check fails or a run goes wrong, 2 for bad input."""
    replace_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What the encoding of a terminal or a log lacks becomes a question mark. A lost stream stays as it is.
        with contextlib.suppress(OSError):
            sys.stdout.reconfigure(errors="replace")
    load_at_start()
    args = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if not args or args[0] in ("-h", "--help"):
            print(_usage(), flush=True)
            return 0 if args else 2
        if args[0] == "--version":
            print(f"trifocal {__version__}", flush=True)
            return 0
        if args[0] not in COMMANDS:
            raise unknown("command", args[0], COMMANDS)
        _check_temporary_folder()
        return int(importlib.import_module(f"trifocal.cli.{args[0]}").run(args[1:]))
    except UserError as error:
        return _fail(str(error), 2)
    except BrokenPipeError:
        # The reader, `head` for example, has enough. Python would write the rest at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        where = f" ({error.filename})" if error.filename else ""
        return _fail(f"{error.strerror}{where}", 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except SystemExit as error:
        # From `--help` of a command.
        return error.code if isinstance(error.code, int) else 0


def _check_temporary_folder() -> None:
    # PyTorch and Triton need one, at their import already.
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise UserError(
            "no folder for temporary files can be written; free space in /tmp, or name another folder in TMPDIR"
        ) from error


def _fail(message: str, status: int) -> int:
    # Standard error may be closed; the status is enough then.
    with contextlib.suppress(OSError):
        print(f"trifocal: {printable(' '.join(message.split()))}", file=sys.stderr)
    return status


def _usage() -> str:
    rows = "\n".join(f"  {name:10} {what}" for name, what in COMMANDS.items())
    hints = "trifocal COMMAND --help shows the flags of a command, trifocal --version the version."
    return f"usage: trifocal COMMAND …\n\n{rows}\n\n{hints}"
