"""`trifocal doctor`: the abilities of this machine, two measured steps of a configuration, remedies of faults."""
