"""The picture of time over length."""

import json

import pytest

from tests.bench.test_comparison import row
from trifocal.bench import plot
from trifocal.errors import UserError

pytest.importorskip("matplotlib")
ROWS = [row("dense cudnn", t, t**2 / 1e6, t**2 / 1e5) for t in (1000, 2000, 8000)]
ROWS += [row("whole", t, t * 4000 / 1e6, t * 0.04, "random") for t in (1000, 2000, 8000)]


def write(path, rows):
    path.write_text(json.dumps({"rows": rows}))
    return path


def test_a_picture_beside_the_file(tmp_path):
    picture = plot.plot_results(write(tmp_path / "a.json", ROWS))
    assert picture == tmp_path / "a.png" and picture.read_bytes().startswith(b"\x89PNG")


def test_lines_and_crossovers_are_drawn():
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    series = {key: ROWS[0][key] for key in plot.SERIES}
    plot._draw(axes, series, ROWS, "forward_ms")
    labels = [line.get_label() for line in axes.get_lines()]
    assert labels[:2] == ["dense cudnn", "NSA, random blocks"]
    assert axes.get_lines()[2].get_xdata()[0] == pytest.approx(4000)
    assert [text.get_text() for text in axes.texts] == ["4,000: dense cudnn"]


def test_one_length_gives_no_picture(tmp_path):
    assert plot.plot_results(write(tmp_path / "a.json", ROWS[:1])) is None
    assert not (tmp_path / "a.png").exists()


def test_what_is_no_result_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="cannot read"):
        plot.plot_results(tmp_path / "absent.json")
    for content in ("no json", "[]", '{"rows": [{"x": 1}]}'):
        path = tmp_path / "b.json"
        path.write_text(content)
        with pytest.raises(UserError, match="is not a result of trifocal bench attention"):
            plot.plot_results(path)
    monkeypatch.setattr(plot, "can_plot", lambda: False)
    with pytest.raises(UserError, match=r"pip install 'trifocal\[docs\]'"):
        plot.plot_results(write(tmp_path / "a.json", ROWS))
