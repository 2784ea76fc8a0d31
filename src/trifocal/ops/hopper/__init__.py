"""The same stages for Hopper (sm_90), in Gluon, under the names of their portable files. `ops.dispatch` alone imports
from here."""
