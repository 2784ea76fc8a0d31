"""The pages of the project and their contents."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Pages about the past: scripts and commands that they name may be gone.
HISTORY = ("CHANGELOG.md", *(page.name for page in ROOT.glob("lab/*.md")))
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("lab/*.md"), *ROOT.glob("*.md")])
_COMMAND = re.compile(r"(trifocal |make |pip install |python benchmarks/)\S")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def text_of(page):
    return page.read_text(encoding="utf-8")


def blocks(page, language):
    """The fenced blocks of a language."""
    return [body for found, body in _FENCE.findall(text_of(page)) if found == language]


def prose(page):
    """The page without its fenced blocks."""
    return _FENCE.sub("", text_of(page))


def inline_code(page):
    """The texts between single backticks in the prose."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def headings(page):
    """Anchors of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(page):
    """The command lines of bash and sh blocks and of inline code, as words; comments are left out."""
    shells = [*blocks(page, "bash"), *blocks(page, "sh")]
    lines = [line for body in shells for line in body.replace("\\\n", " ").splitlines()]
    lines += [code for code in inline_code(page) if _COMMAND.match(code)]
    words = [shlex.split(line, comments=True) for line in lines]
    return [line for line in words if line]
