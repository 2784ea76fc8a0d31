"""A console whose texts cannot control the terminal."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from trifocal.cli.output import printable


class SafeConsole(Console):
    """A rich console that passes every text through `printable`; colours and cursor movements are rich's alone."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of the output."""
        for segment in super().render(renderable, options):
            # Of no width, so that nothing moves when they are left out.
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
