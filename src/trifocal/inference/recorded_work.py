"""Work that is recorded as CUDA graphs, so that the host starts all its kernels at once."""

from collections.abc import Callable, Hashable

import torch


class RecordedWork:
    """Work by key as CUDA graphs in one pool of memory: the same kernels with the same tensors each time. The first run
    of a key compiles, the second is recorded; on a CPU, and beyond `most` keys, nothing is.
    """

    def __init__(self, device: torch.device, most: int | None = None) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        self._on_gpu, self._most = device.type == "cuda", most
        if self._on_gpu:
            self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do work."""
        if not self._on_gpu or (key not in self._graphs and len(self._graphs) == self._most):
            work()
            return
        if key not in self._graphs:
            self._graphs[key] = None
            work()
            return
        graph = self._graphs[key]
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            # Threads that pin memory for other tensors must not spoil the recording.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                work()
            self._graphs[key] = graph
        graph.replay()
