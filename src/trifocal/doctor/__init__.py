"""`trifocal doctor`: the abilities of this machine, two measured steps of a configuration, remedies of faults."""

from trifocal.doctor.examination import Examination, examine
from trifocal.doctor.machine import Finding

__all__ = ["Examination", "Finding", "examine"]
