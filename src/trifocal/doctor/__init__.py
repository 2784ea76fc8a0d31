"""`trifocal doctor`: what this machine can do, what each preset would need here, what is wrong and what mends it."""

from trifocal.doctor.examination import Examination, examine
from trifocal.doctor.findings import Finding
from trifocal.doctor.needs import Need

__all__ = ["Examination", "Finding", "Need", "examine"]
