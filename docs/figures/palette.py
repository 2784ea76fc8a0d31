"""Colours and style that all figures of the docs share."""

# One colour a branch, everywhere; distinct for colour-blind readers too.
COMPRESSED, SELECTED, WINDOW, DENSE = "#1f6fb2", "#e07b00", "#0b8f6a", "#6b7280"
INK, QUIET, PAST = "#1f2933", "#7b8794", "#eceff3"
DARK = "@media (prefers-color-scheme: dark) { svg { filter: invert(0.93) hue-rotate(180deg); } }"
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlecolor": INK,
    "figure.constrained_layout.h_pad": 0.12,
    "figure.constrained_layout.w_pad": 0.12,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "text.color": INK,
    "svg.hashsalt": "trifocal",  # the same names inside the file at every drawing
}
