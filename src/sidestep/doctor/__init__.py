"""What is known to fail without an error: found in a config and its surroundings before a run.

`diagnose` gives a list of findings, each with its fix. An "error" is what `train` refuses; a
"warning" is allowed and seldom meant. The page docs/doctor.md lists them all.
"""

from sidestep.doctor.checks import checked, diagnose
from sidestep.doctor.finding import CODES, Finding
from sidestep.doctor.surroundings import Surroundings, surroundings_of

__all__ = ["CODES", "Finding", "Surroundings", "checked", "diagnose", "surroundings_of"]
