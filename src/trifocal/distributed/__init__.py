"""Training in several processes: rendezvous, collectives on the host, parallel modes, detection of lost processes."""

from trifocal.distributed.flat_gradients import FlatGradients
from trifocal.distributed.parallel import Parallel, choose_mode, parallelize, whole_model
from trifocal.distributed.peers import PeerLost, Peers
from trifocal.distributed.processes import Processes, leave_at_once, processes_started

__all__ = [
    "FlatGradients",
    "Parallel",
    "PeerLost",
    "Peers",
    "Processes",
    "choose_mode",
    "leave_at_once",
    "parallelize",
    "processes_started",
    "whole_model",
]
