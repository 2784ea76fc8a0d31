"""`trifocal doctor`: the abilities of this machine, the needs of each preset, and commands that mend faults."""

from trifocal.doctor.examination import Examination, examine
from trifocal.doctor.findings import Finding
from trifocal.doctor.needs import Need

__all__ = ["Examination", "Finding", "Need", "examine"]
