"""The one exception that a person, not a program, is meant to read, and the hint that many of its messages end with."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input from a command line, a config or a file.

    The message is one clear line: what was given, what was expected, what to do. The command line prints it
    without a traceback and exits with status 2.
    """


def unknown(what: str, name: str, valid: Iterable[str], source: str = "") -> UserError:
    """The refusal of a name that does not exist, with the nearest one that does.

    Args:
        what: What the name would be of: "key", "flag".
        name: What was given.
        valid: What would have been right; at least one.
        source: Begins the message: where the name stands.
    """
    return UserError(f'{source}unknown {what} "{name}"; the nearest valid one is "{nearest(name, valid)}"')


def nearest(name: str, valid: Iterable[str]) -> str:
    """The valid name that a person most likely meant.

    Args:
        name: What was given, possibly dotted.
        valid: What would have been right; at least one. A name with the same last part wins over one that looks alike.
    """
    names = sorted(valid)
    leaf = name.rpartition(".")[2]
    same_leaf = [candidate for candidate in names if candidate.rpartition(".")[2] == leaf]

    # Of names that are equally alike the last: "steps" may mean train.steps or trace.steps.
    def likeness(candidate: str) -> tuple[float, str]:
        return difflib.SequenceMatcher(None, candidate.lower(), name.lower()).ratio(), candidate

    return max(same_leaf or names, key=likeness)
