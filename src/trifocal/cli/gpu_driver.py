"""Starting the GPU's driver, for half a second, in a thread beside the import of PyTorch."""

import contextlib
import ctypes
import os
import threading


def start_driver() -> None:
    """Begin to create the context of the first GPU, which PyTorch takes over.

    Without a GPU, or where the driver fails, nothing happens: PyTorch says so when it needs one.
    """
    # PyTorch sets it before it calls the driver, which reads it once.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    threading.Thread(target=_create_context, name="GPU driver").start()


def _create_context() -> None:
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
