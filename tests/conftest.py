"""Settings for all tests, made before Triton is imported: without a GPU, kernels run in Triton's interpreter."""

import os
import signal

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Under nohup a run ignores SIGHUP, as it should, and so would the runs that tests send it to.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
