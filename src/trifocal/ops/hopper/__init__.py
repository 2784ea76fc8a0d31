"""The same stages for Hopper (sm_90), in Gluon, under the names of their portable files. Only `ops.dispatch` imports
from here."""
