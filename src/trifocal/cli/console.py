"""A console whose texts cannot control the terminal."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from trifocal.cli.output import printable


class SafeConsole(Console):
    """A rich console that passes every text through `printable`, without markup and emoji: only rich moves a cursor."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)
        if not self.width:
            # COLUMNS=0, as some batch systems and editors set it.
            self.width = 80

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of the output."""
        for segment in super().render(renderable, options):
            # They take no width: nothing moves when they are left out.
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
