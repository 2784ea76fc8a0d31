"""The report's attention picture, from the files of attention_picture.py."""

import base64
import json
from dataclasses import asdict
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trifocal.runlog.run import Run
from trifocal.telemetry.attention_picture import AttentionPicture, read_picture

# Escapes for `</script>` and `<!-- <script>`, which would end or change a script element; and for the two line ends
# that JSON allows in a string and older JavaScript does not.
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}

_MAX_FRAMES = 6
"""Steps on the page, evenly spaced, including the first and the last."""
MAPS = {
    "cmp": ("Scores that choose", "Share of each block, by compressed keys or an index, relative to an even spread."),
    "slc": ("Selected", "Blocks read token by token; paler, those always read."),
    "win": ("Window", "The last tokens, read one by one."),
    "dense": ("Full attention", "Its probability. Selection should find the strongest blocks."),
}


def pictures_of(run: Run) -> list[AttentionPicture]:
    """The pictures of the run's last sequence, at a few steps; UserError if one of the files is damaged."""
    paths = run.pictures
    if not paths:
        return []
    chosen = np.unique(np.linspace(0, len(paths) - 1, min(len(paths), _MAX_FRAMES)).round().astype(int))
    pictures = [read_picture(paths[index]) for index in chosen]
    return [picture for picture in pictures if picture.texts == pictures[-1].texts]


def picture_card(pictures: list[AttentionPicture]) -> str:
    """The picture with its controls, as HTML for picture.js, of at least one picture of a run."""
    last = pictures[-1]
    num_groups = last.importance.shape[2]
    layers = _select("layer", list(range(len(_shown(last)))), last.layers[-1])
    groups = _select("group", list(range(num_groups)), 0)
    frames = len(pictures) - 1
    hidden = " hidden" if frames == 0 else ""
    maps = "".join(
        f'<figure><figcaption><span class="key" data-colour="{key}"></span><b>{title}</b>'
        f'<span class="soft">{caption}</span></figcaption><div class="map" data-map="{key}"></div></figure>'
        for key, (title, caption) in MAPS.items()
    )
    words = (
        "Each row is a query, each column a key; hover or tap to see which. Below, the text itself, as that query "
        f"sees it. One sequence of validation text, {len(last.texts):,} tokens, at {len(last.queries)} queries."
    )
    data = json_in_page(_data(pictures))
    return f"""<div class="card picture"><h3>What each branch reads</h3><p class="soft">{escape(words)}</p>
<div class="controls">{layers}{groups}<label{hidden}>step <input type="range" class="frame" min="0" max="{frames}"
value="{frames}"><output class="frame-label"></output></label></div>
<div class="maps">{maps}</div>
<div class="reader"><div class="controls"><label>query <input type="range" class="row" min="0"
max="{len(last.queries) - 1}" value="{len(last.queries) - 1}"></label><output class="soft reader-head"></output></div>
<div class="gates"></div>
<p class="soft legend"><span data-of="slc"><span class="sample-cmp">shaded</span> high score ·
<span class="sample-slc">underlined</span> selected · </span>
<span data-of="win"><span class="sample-win">overlined</span> window · </span>
<span class="sample-unread">faint</span> future or another document</p>
<pre class="text" tabindex="0" aria-label="The sequence, as the query sees it"></pre></div>
<script type="application/json">{data}</script></div>"""


def json_in_page(value: object) -> str:
    """JSON that is safe in any element of an HTML page, with any text in it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).translate(_ESCAPES)


def _select(name: str, labels: list[int], selected: int) -> str:
    options = "".join(
        f'<option value="{index}"{" selected" if index == selected else ""}>{escape(str(label))}</option>'
        for index, label in enumerate(labels)
    )
    return f'<label{" hidden" if len(labels) == 1 else ""}>{name} <select class="{name}">{options}</select></label>'


def _data(pictures: list[AttentionPicture]) -> dict[str, Any]:
    last = pictures[-1]
    _, _, num_groups, num_blocks = last.importance.shape
    return {
        "shown": _shown(last),
        "groups": num_groups,
        "blocks": num_blocks,
        "slots": last.selected.shape[-1],
        "geometry": asdict(last.geometry),
        "texts": last.texts,
        "positions": last.positions.tolist(),
        "documents": last.documents.tolist(),
        "queries": last.queries.tolist(),
        "frames": [
            {
                "step": picture.step,
                "selected": _base64(picture.selected.astype("<i2")),
                "importance": _base64(picture.importance),
                "dense": _base64(picture.dense),
                "gates": _base64(picture.gates),
            }
            for picture in pictures
        ],
    }


def _shown(picture: AttentionPicture) -> list[tuple[int, int]]:
    """Of each layer of the model: the place of its arrays and 0; or -1 and its window, 0 for everything."""
    shown = {number: (place, 0) for place, number in enumerate(picture.layers)}
    shown |= {number: (-1, window) for number, window in picture.others}
    return [shown[number] for number in range(len(shown))]


def _base64(array: NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
