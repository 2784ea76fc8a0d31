"""Errors of other libraries, in one printable line."""

from __future__ import annotations


def one_line(error: object) -> str:
    """The text of an error: at most 200 characters, without line breaks or control characters.

    Args:
        error: An exception, or a text.
    """
    text = " ".join(str(error).split())[:200]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
