"""`trifocal doctor`: the abilities of this machine, the needs of each preset, and commands that mend faults."""

from trifocal.doctor.examination import Examination, examine
from trifocal.doctor.findings import Finding

__all__ = ["Examination", "Finding", "examine"]
