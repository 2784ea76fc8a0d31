"""`trifocal` with a fault in it; tests start it in place of the command.

`python faults.py NAME ARGUMENTS…`; only rank 1 has a fault unless it says otherwise. Faults leave the file `fault`
beside the run's folder when they strike, so that a test knows when.
"""

import builtins
import contextlib
import errno
import functools
import os
import sys
import threading
import time
from pathlib import Path

import torch

from tests.train import tiny
from trifocal.cli import main
from trifocal.data.sources.text import TextSource
from trifocal.distributed import peers
from trifocal.nn.block import SwiGLU
from trifocal.train import run_logger, validation_loss
from trifocal.train import setup as train_setup
from trifocal.train.checkpoint import save_load as checkpoint_module
from trifocal.train.step import cuda_graphs

RANK = int(os.environ.get("RANK", "0"))
STEP = 3


def mark():
    """Tell the test that the fault has struck."""
    Path(os.environ["FAULT_FILE"]).touch()


def before_step(action):
    """Call `action(step, parts)` before each training step of this process."""
    tiny.before_step(builtins, action)


def at_step(action, step=STEP):
    """Call `action()` before one step of rank 1."""
    before_step(lambda number, _: action() if number == step and RANK == 1 else None)


def wait_at_step():
    """Every rank waits before step 3 until the test lets it continue, so that a signal meets a known step."""
    before_step(lambda step, _: _pause() if step == STEP else None)


def _pause():
    mark()
    while not Path(os.environ["FAULT_FILE"] + ".go").exists():
        time.sleep(0.01)


def pause_in_compilation():
    """Every rank pauses in the first call of a compiled layer, as a compiler would take its time."""

    def compiled(function, **options):
        calls = [0]

        def call(*args, **kwargs):
            calls[0] += 1
            if calls[0] == 1:
                _pause()
            return function(*args, **kwargs)

        return call

    torch.compile = compiled


def hang():
    """An endless loop of Python code, in which a test may stop or kill the process; it leaves the core to others."""

    def loop():
        mark()
        while True:
            time.sleep(0.001)

    at_step(loop)


def hang_with_a_short_pause():
    """The same; a rank that knows of it ends a second later, if its exchange has not failed by then."""
    peers._PAUSE_SECONDS = 1.0
    hang()


def _die():
    if not Path(os.environ["FAULT_FILE"]).exists():
        mark()
        os.kill(os.getpid(), 9)


def die_once():
    """Killed in step 5, on the first start only."""
    at_step(_die, 5)


class _Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, upstream):
        return upstream * torch.nan


def nan():
    """The gradient of one matrix is NaN, in one step."""
    original = SwiGLU.forward
    now = [0]
    before_step(lambda step, _: now.__setitem__(0, step))

    def forward(self, x):
        if now[0] == STEP and RANK == 1:
            y = torch.nn.functional.silu(self.gate_proj(x)) * _Poison.apply(self.up_proj(x.detach()))
            return self.down_proj(y)
        return original(self, x)

    SwiGLU.forward = forward


def compiled():
    """No fault: layers are traced and split into forward and backward, without a code generator; graphs are noted."""
    from torch._dynamo.backends.debugging import aot_eager

    def compiler(graph, inputs):
        with Path(f"{os.environ['FAULT_FILE']}{RANK}").open("a") as file:
            file.write(f"{len(list(graph.graph.nodes))}\n")
        return aot_eager(graph, inputs)

    torch.compile = functools.partial(torch.compile, backend=compiler)


def graphs():
    """No fault: recordings are repetitions, so that everything around them runs on a CPU."""
    cuda_graphs.GraphRecorder = tiny.Repeater
    torch.Tensor.pin_memory = lambda self: self
    original = train_setup.parallelize
    train_setup.parallelize = lambda *args, **options: original(*args, **options | {"exchange_after": True})

    def make_graphs(parallel, model, config, device, loss_function):
        assert parallel.sharded or parallel.flat_gradients is not None
        return cuda_graphs.MicroBatchGraphs(loss_function, model, device, config.precision, parallel), ""

    train_setup.make_graphs = make_graphs


def _in_the_ninth_file(action):
    original = TextSource.read
    files = [0]

    def read(self, shard, cursor):
        files[0] += 1
        if files[0] > 8 and RANK == 1:
            action()
        yield from original(self, shard, cursor)

    TextSource.read = read


def data():
    """The disk of the text fails in one process, some files on."""

    def fail():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    _in_the_ninth_file(fail)


def stalled_data():
    """The disk of the text never answers one process, some files on."""
    _in_the_ninth_file(lambda: (mark(), threading.Event().wait()))


def endless_evaluation():
    """Every rank evaluates for hours."""
    batches, loss = train_setup.TrainSetup.validation_batches, validation_loss.batch_loss
    train_setup.TrainSetup.validation_batches = lambda self: batches(self) * 100_000

    def batch_loss(*args):
        mark()
        return loss(*args)

    validation_loss.batch_loss = batch_loss


def full():
    """The disk is full, in the middle of the checkpoint of step 4."""
    original = checkpoint_module._write

    def write(path, text):
        if RANK == 1 and "00000004" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(path, text)

    checkpoint_module._write = write


def another_disk():
    """Each rank has a disk of its own: relative paths lead to other files."""
    os.chdir(Path(os.environ["FAULT_FILE"]).with_name(f"disk{RANK}"))


def quick_stalls(minimum_seconds):
    """A phase may count as stalled this soon, not after minutes."""
    run_logger.Heartbeat = functools.partial(run_logger.Heartbeat, minimum_stall_seconds=minimum_seconds)


def endless_hook():
    """A backward hook of one parameter that never returns."""
    quick_stalls(2.0)
    now = [0]

    def endless(parameter):
        if now[0] == STEP:
            mark()
        while now[0] == STEP:
            time.sleep(0.001)

    def action(step, parts):
        if RANK == 1 and step == 1:
            next(parts["loss_function"].parameters()).register_post_accumulate_grad_hook(endless)
        now[0] = step

    before_step(action)


def full_disk():
    """The disk of the run fills up in step 3, stays full through a stall, and has room again in step 6."""
    quick_stalls(0.5)
    filler = Path(os.environ["RUN"]) / "filler"

    def action(step, _):
        if step == STEP:
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(b"0" * 4096):
                    pass
            mark()
        if step == 6:
            filler.unlink()

    before_step(action)
    original = SwiGLU.forward
    slept = []

    def forward(self, x):
        if filler.exists() and not slept:
            slept.append(True)
            time.sleep(2.5)
        return original(self, x)

    SwiGLU.forward = forward


if __name__ == "__main__":
    name = sys.argv[1]
    if name:
        globals()[name]()
    sys.exit(main(sys.argv[2:]))
