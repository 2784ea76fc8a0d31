"""Settings for all tests, made before Triton is imported: without a GPU, kernels run in Triton's interpreter."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
