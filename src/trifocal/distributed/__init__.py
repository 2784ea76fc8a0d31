"""Training in several processes: rendezvous, collectives on the host, parallel modes, detection of lost processes."""

from trifocal.distributed.parallel import Parallel, choose_mode, gather_full_model, parallelize
from trifocal.distributed.peers import PeerLost, PeerMonitor
from trifocal.distributed.processes import Processes, hard_exit, processes_started

__all__ = [
    "Parallel",
    "PeerLost",
    "PeerMonitor",
    "Processes",
    "choose_mode",
    "gather_full_model",
    "hard_exit",
    "parallelize",
    "processes_started",
]
