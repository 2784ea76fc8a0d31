"""The exception for mistakes of the user, and texts that its messages share."""

import difflib
from collections.abc import Iterable

_NEAR = 0.6
"""Likeness from which on a name is proposed in place of another."""
_LONGEST = 80
_FEW = 24
"""At most this many valid names are listed where none is near."""


class UserError(ValueError):
    """Bad input: one clear line with the given value, the expected one and the remedy, printed without a traceback."""


def unknown(what: str, name: str, valid: Iterable[str], source: str = "") -> UserError:
    """The error for a name that does not exist, of a kind such as "key" in `source`, with the nearest valid one."""
    names = list(valid)
    name = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}…"
    if not names:
        hint = "there is none"
    elif best := nearest(name, names, _NEAR):
        hint = f'the nearest valid one is "{best}"'
    else:
        hint = f"valid are {', '.join(names)}" if len(names) <= _FEW else "no valid one is near"
    return UserError(f'{source}unknown {what} "{name}"; {hint}')


def nearest(name: str, valid: Iterable[str], likeness: float = 0.0) -> str:
    """The valid name most like this one, "" if none is as alike; of dotted names one with the same last part wins."""
    names = sorted(valid)
    leaf = name.rpartition(".")[2]
    same_leaf = [candidate for candidate in names if candidate.rpartition(".")[2] == leaf]
    # Among equally similar names the last wins: "steps" may mean train.steps or trace.steps.
    best = max(same_leaf or names, key=lambda candidate: (_likeness(name, candidate), candidate), default="")
    return best if _likeness(name, best) >= likeness else ""


def _likeness(name: str, candidate: str) -> float:
    """How alike two dotted names are, or their last parts, from 0 to 1."""
    pairs = ((name, candidate), (name.rpartition(".")[2].lstrip("-"), candidate.rpartition(".")[2].lstrip("-")))
    return max(difflib.SequenceMatcher(None, b.lower(), a.lower()).ratio() for a, b in pairs)


def one_line(error: object, most: int = 300) -> str:
    """A text, or an exception's, on one line of printable characters, cut to `most`; if empty, its type, or quotes."""
    text = " ".join(str(error).split()) or (repr(error) if isinstance(error, str) else type(error).__name__)
    text = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def first_sentence(error: Exception) -> str:
    """The first sentence of an exception's text, for libraries whose texts are paragraphs; one line."""
    return one_line(next(iter(str(error).strip().splitlines()), "").partition(". ")[0] or type(error).__name__)
