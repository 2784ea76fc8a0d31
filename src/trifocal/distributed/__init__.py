"""Training in several processes: rendezvous, collectives on the host, parallel modes, detection of lost processes."""
