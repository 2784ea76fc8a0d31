"""Training in several processes: rendezvous, collectives on the host, parallel modes, detection of lost processes."""

from trifocal.distributed.parallel import Parallel, choose_mode, gather_full_model, parallelize
from trifocal.distributed.peers import PeerLost, PeerMonitor
from trifocal.distributed.processes import DistributedContext, hard_exit, processes_started, rank_and_size

__all__ = [
    "DistributedContext",
    "Parallel",
    "PeerLost",
    "PeerMonitor",
    "choose_mode",
    "gather_full_model",
    "hard_exit",
    "parallelize",
    "processes_started",
    "rank_and_size",
]
