"""The exception for mistakes of the user, and texts that its messages share."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input from a command line, a config or a file.

    The message is one clear line: the given value, the expected one, the remedy. The command line prints it
    without a traceback and exits with status 2.
    """


def unknown(what: str, name: str, valid: Iterable[str], source: str = "") -> UserError:
    """The error for a name that does not exist, with the nearest valid one.

    Args:
        what: Kind of the name: "key", "flag".
        name: The name given.
        valid: The valid names; at least one.
        source: Begins the message: the place of the name.
    """
    return UserError(f'{source}unknown {what} "{name}"; the nearest valid one is "{nearest(name, valid)}"')


def nearest(name: str, valid: Iterable[str]) -> str:
    """The valid name that the user most likely meant.

    Args:
        name: The name given, possibly dotted.
        valid: The valid names; at least one. A name with the same last part wins over one that looks alike.
    """
    names = sorted(valid)
    leaf = name.rpartition(".")[2]
    same_leaf = [candidate for candidate in names if candidate.rpartition(".")[2] == leaf]

    # Among equally similar names the last wins: "steps" may mean train.steps or trace.steps.
    def likeness(candidate: str) -> tuple[float, str]:
        return difflib.SequenceMatcher(None, candidate.lower(), name.lower()).ratio(), candidate

    return max(same_leaf or names, key=likeness)


def one_line(error: object, most: int = 300) -> str:
    """The text of an exception, or a text, on one line of printable characters; the type where there is no text.

    Args:
        error: An exception or a text.
        most: The line is cut to so many characters.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
