"""The report in a real browser, and its words and figures without one."""

import html
import json
import math
import re
import sys
from dataclasses import replace

import pytest

from tests.report.browser import Browser, find
from tests.written_runs import TEXT, set_last_beat, wait_for, write_picture, write_run
from trifocal.errors import UserError
from trifocal.report import write_report
from trifocal.report.attention_charts import attention_charts
from trifocal.report.charts import Chart, thin, training_charts
from trifocal.report.page import _charts as charts_of_page
from trifocal.report.page import build_page
from trifocal.report.picture import pictures_of
from trifocal.report.summary import summarise
from trifocal.report.tables import comparison
from trifocal.runlog.metrics import MetricsWriter
from trifocal.runlog.run import read_run
from trifocal.telemetry.attention_picture import read_picture

CHARTS_OF_A_CPU_RUN = 7
ATTENTION_CHARTS = 6
MAPS = 4
GPU_ONLY_CHARTS = 1


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    executable = find()
    if executable is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    with Browser(executable, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory):
    """The browser with one report in it; each test that takes it touches another part of the page."""
    browser.open(write_report(write_run(tmp_path_factory.mktemp("report") / "run", steps=400)))
    return browser


def drawn(browser):
    """Charts in the page whose plot has marks on it."""
    script = """[...document.querySelectorAll('.js-plotly-plot')].filter(
        (plot) => plot.querySelector('.scatterlayer .trace, .barlayer .trace, .heatmaplayer image')).length"""
    return int(browser.evaluate(script))


# The page of `opened` is wide and light.
@pytest.mark.parametrize(("width", "theme"), [(1280, "dark"), (390, "light")])
def test_every_chart_is_drawn_without_a_word_on_the_console(make_run, browser, width, theme):
    page = write_report(make_run(steps=300, gpu=True, ranks=2))
    browser.requests.clear()
    browser.open(page, width=width, theme=theme)
    assert browser.problems == []
    assert drawn(browser) == CHARTS_OF_A_CPU_RUN + GPU_ONLY_CHARTS + ATTENTION_CHARTS + MAPS
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than its screen"
    assert browser.evaluate("document.documentElement.dataset.theme") == theme
    fetched = {url for url in browser.requests if not url.startswith(("data:", "blob:"))}
    assert fetched == {page.resolve().as_uri()}


def test_the_picture_shows_the_text_that_a_query_reads(opened):
    key = TEXT.index("second")

    def pane(selector):
        parts = f"[...document.querySelectorAll('.reader .text {selector}')].map((part) => part.textContent)"
        return str(opened.evaluate(f"{parts}.join('|')"))

    # The cell of the last row, at the column of a word in its document, by its distance in pixels.
    point = f"""(() => {{
      const div = document.querySelector('[data-map=slc]'), layout = div._fullLayout, box = div.getBoundingClientRect();
      return [box.left + layout.xaxis._offset + layout.xaxis.d2p({key}),
              box.top + layout.yaxis._offset + layout.yaxis.d2p({len(TEXT) - 1})];
    }})()"""
    opened.evaluate("document.querySelector('.picture').scrollIntoView()")
    x, y = opened.evaluate(point)
    opened.call("Input.dispatchMouseEvent", type="mouseMoved", x=x - 4, y=y)
    opened.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    tip = "document.querySelector('.tip').hidden ? '' : document.querySelector('.tip').innerText"
    wait_for(lambda: opened.evaluate(tip), 10)
    text = opened.evaluate(tip)
    second = TEXT.index("∎") + 1
    start = second + (key - second) // 8 * 8
    assert f"Tokens {start}\N{EN DASH}{start + 7} for query {len(TEXT) - 1}" in text
    assert TEXT[start : start + 8] in text and "not selected" in text
    wait_for(lambda: pane("mark") == "\N{RETURN SYMBOL}\n", 10)
    own = second + (len(TEXT) - 1 - second) // 8 * 8
    assert pane(".unread") == TEXT[:second], "another document is not read"
    assert pane(".slc").replace("|", "") == TEXT[second : second + 8] + TEXT[own - 16 : len(TEXT) - 1]
    assert pane(".win").replace("|", "") == TEXT[len(TEXT) - 12 : len(TEXT) - 1]
    assert opened.problems == []


def test_layer_group_and_step_of_the_picture_can_be_chosen(opened):
    assert opened.evaluate("[...document.querySelectorAll('.picture select.layer option')].length") == 6
    assert opened.evaluate("document.querySelector('.picture select.layer').value") == "5", "the last that chooses"
    script = """(async () => {
      const set = (name, value) => {
        const input = document.querySelector('.picture ' + name);
        input.value = value;
        input.dispatchEvent(new Event('input'));
      };
      set('.layer', 1); set('.group', 1); set('.frame', 0); set('.row', 3);
      await new Promise((done) => setTimeout(done, 300));
      return [document.querySelector('.frame-label').textContent, document.querySelector('.text mark').textContent];
    })()"""
    assert opened.evaluate(script) == ["200", TEXT[3] if TEXT[3].strip() else "\N{MIDDLE DOT}"]
    assert "hold 100 %" in opened.evaluate("document.querySelector('.reader-head').textContent")
    assert opened.evaluate("document.querySelectorAll('.text .win').length") == 0, "the layer has no window"
    legend = opened.evaluate("document.querySelector('.picture .legend').innerText")
    assert "selected" in legend and "window" not in legend
    assert opened.evaluate("document.querySelectorAll('.picture .gates span').length") == 0, "it has no gates"
    assert opened.problems == []


def test_layers_that_choose_no_blocks_show_what_they_read(opened):
    second, row = TEXT.index("∎") + 1, len(TEXT) - 9
    script = """(async (layer) => {
      const picture = document.querySelector('.picture'), text = (parts) => [...parts].map((one) => one.textContent);
      for (const [name, value] of [['.layer', layer], ['.row', %d]]) {
        picture.querySelector(name).value = value;
        picture.querySelector(name).dispatchEvent(new Event('input'));
        await new Promise((done) => setTimeout(done, 300));
      }
      return [text(picture.querySelectorAll('figure:not([hidden]) b')), picture.querySelector('.legend').innerText,
              picture.querySelector('.reader-head').textContent, text(picture.querySelectorAll('.text .win')).join(''),
              picture.querySelectorAll('.text .slc, .gates span').length];
    })(%d)"""
    for layer, title, words, first in (
        (3, "Window", "the layer reads the last 20 tokens", row - 19),
        (4, "All tokens", "the layer reads all tokens", second),
    ):
        maps, legend, head, read, chosen = opened.evaluate(script % (row, layer))
        assert maps == [title] and head.endswith(words) and read == TEXT[first:row] and chosen == 0
        assert "window" in legend and "selected" not in legend
    assert opened.problems == []


def test_a_long_run_keeps_a_few_pictures_with_both_ends(make_run):
    run = make_run(steps=300)
    for step in range(310, 420, 10):
        write_picture(run, step, 4)
    steps = [picture.step for picture in pictures_of(read_run(run))]
    assert len(steps) == 6 and (steps[0], steps[-1]) == (150, 410)
    path = run / "attention" / "step_00000150.npz"
    first = read_picture(path)
    replace(first, texts=["of another sequence", *first.texts[1:]]).save(path)
    assert [picture.step for picture in pictures_of(read_run(run))] == steps[1:]


def test_a_comparison_draws_every_run(make_run, browser):
    runs = [make_run("nsa", steps=300), make_run("dense", steps=300, learning_rate=1e-3, telemetry=False)]
    page = write_report(runs, runs[0].parent / "both.html")
    browser.open(page)
    assert browser.problems == []
    assert browser.evaluate("document.querySelectorAll('#chart-throughput .scatterlayer .trace').length") == 2
    text = browser.evaluate("document.body.innerText")
    assert "optimizer.learning_rate" in text and "data.source" not in text.split("Environment and config")[0]


def test_losses_stand_beside_the_first_run_where_their_rows_are_the_same(make_run):
    folders = [make_run(name, steps=300) for name in ("dense", "mix", "other text")]
    metrics = folders[1] / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    raised = [{**row, "validation_loss": row["validation_loss"] + 0.01} for row in rows if row["kind"] == "evaluation"]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in raised[1:]))
    config = folders[2] / "config.toml"
    config.write_text(config.read_text().replace('"builtin"', '"text:other"'))
    runs = [read_run(folder) for folder in folders]
    [chart] = [chart for chart in training_charts(runs) if chart.key == "above_first"]
    [above] = chart.traces
    assert above["name"] == "mix" and above["x"] == [200, 300] and above["y"] == pytest.approx([0.01, 0.01], rel=1e-4)
    assert "no file of it has changed" in chart.caption
    assert "above_first" not in {chart.key for chart in training_charts(runs[:1])}


def test_orders_and_shares_of_the_training_text_leave_the_held_out_rows(make_run):
    folders = [make_run(name, steps=300) for name in ("first", "other order")]
    config = folders[1] / "config.toml"
    config.write_text(config.read_text().replace("[data]\n", "[data]\nseed = 8\nweights = [1, 2]\n"))
    charts = training_charts([read_run(folder) for folder in folders])
    assert [trace["name"] for chart in charts if chart.key == "above_first" for trace in chart.traces] == [
        "other order"
    ]


def test_types_of_layers_that_repeat_are_shown_once(make_run):
    runs = [make_run(name, steps=100) for name in ("dense", "mix")]
    types = ["window", "window", "window", "selected"]
    config = runs[1] / "config.toml"
    config.write_text(config.read_text().replace("[model]", f"[model]\nlayer_types = {json.dumps(types * 3)}"))
    table = re.sub("<.*?>", " ", html.unescape(comparison([read_run(run) for run in runs])))
    assert json.dumps(types) + ", repeated" in table and table.count('"selected"') == 1
    assert "selected and window attention, " in build_page([read_run(runs[1])], "")
    # It says nothing of a model whose layers have types.
    assert re.search(r'model.attention\s+"nsa"\s+-', table)


def test_runs_named_by_dates_and_in_other_alphabets_are_told_apart(make_run):
    runs = [read_run(make_run(name, steps=100)) for name in ("2026-11-28", "2026-11-29", "日本", "中国")]
    [phases] = [chart for chart in training_charts(runs) if chart.key == "phases"]
    assert phases.layout["yaxis"]["type"] == "category"
    page = build_page(runs, "")
    sections = re.findall(r'<section id="(.*?)"', page)
    assert len({*sections}) == len(sections) == 4 * 3 + 4 and "training" in sections
    assert re.findall(r'<a href="#(.*?)"', page) == sections


def test_the_page_is_one_file_with_plotly_in_it_once(make_run):
    run = make_run(steps=300)
    page = write_report(run)
    assert page == run / "report.html" and page.stat().st_size < 7e6
    outside, scripts = re.subn(r"<script.*?</script>", "", page.read_text(), flags=re.DOTALL)
    assert scripts == 4 and not re.findall(r"""(?:src|href)=["'](?!data:|#)""", outside)


def test_text_of_the_run_cannot_become_part_of_the_page(make_run):
    run = make_run(steps=300)
    evil = "</script><script>alert(1)</script>"
    (run / "samples" / "step_99999999.txt").write_text(evil)
    with MetricsWriter(run / "metrics.jsonl") as metrics:
        metrics.event(300, evil, evil, severity="warning")
        metrics.write("train", 301, loss=float("nan"))
    for path in (run / "attention").glob("*.npz"):
        picture = read_picture(path)
        replace(picture, texts=[evil, *picture.texts[1:]]).save(path)
    assert "<script>alert" not in write_report(run).read_text()


def test_a_picture_whose_parts_do_not_fit_is_one_line(make_run):
    run = make_run(steps=300)
    for path in (run / "attention").glob("*.npz"):
        replace(read_picture(path), layers=["0"]).save(path)
    with pytest.raises(UserError, match="cannot show the pictures in"):
        write_report(run)


def test_cells_of_tables_are_escaped(tmp_path):
    """The names of runs and hosts, and the values of their configurations, side by side."""
    evil = "<b class=evil>"
    runs = [write_run(tmp_path / f"{evil}{number}", steps=100, layers=1) for number in (1, 2)]
    for number, run in enumerate(runs):
        config = (run / "config.toml").read_text()
        (run / "config.toml").write_text(re.sub(r'source = ".*"', f'source = "text:/{evil}{number}"', config))
        set_last_beat(run, host=evil)
    path = write_report(runs)
    # The report of the first run is another page.
    assert path == runs[0] / "comparison.html"
    page = path.read_text()
    assert evil not in page
    # A chart may be named after its run.
    assert evil not in charts_of_page([Chart("key", evil, evil, [])])
    assert page.count("&lt;b class=evil&gt;1") > 5 and "text:/&lt;b class=evil&gt;1" in page


def test_a_report_is_not_written_through_a_link(make_run, tmp_path):
    run, outside = make_run(steps=100), tmp_path / "outside"
    outside.write_text("mine")
    (run / "report.html").symlink_to(outside)
    page = write_report(run)
    assert outside.read_text() == "mine" and page.is_file() and not page.is_symlink()


def test_a_run_that_only_began_and_what_is_no_run(make_run, tmp_path):
    empty = tmp_path / "empty"
    (empty / "heartbeat").mkdir(parents=True)
    page = write_report(empty).read_text()
    assert "Too few rows to tell yet" in page and "No heartbeat was written" in page
    with pytest.raises(UserError, match=r"there is no run at .*: no such folder"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"there is no run at .*report.html: it is a file"):
        write_report(empty / "report.html")
    with pytest.raises(UserError, match="is not a run"):
        write_report(tmp_path)
    with pytest.raises(UserError, match="at least one"):
        write_report([])
    fine = make_run("fine", steps=100)
    (fine / "report.html").mkdir()
    with pytest.raises(UserError, match=r"cannot write the report to .*: Is a directory; name another file with --out"):
        write_report(fine)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the report"):
        write_report(fine, tmp_path / "file" / "report.html")


def test_without_plotly_the_error_names_the_extra(make_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UserError, match=r"pip install 'trifocal\[report\]'"):
        write_report(make_run(steps=100))


def marks(run):
    return [finding.mark for finding in summarise(read_run(run))]


def words(run):
    return " ".join(finding.text for finding in summarise(read_run(run)))


def test_a_good_run_is_called_good(make_run):
    run = make_run(steps=2000, gpu=True)
    assert marks(run)[:3] == ["good", "good", "good"]
    assert "1.690 nats per token" in words(run) and "of the GPU's peak (executed FLOPs): it is well used" in words(run)


def test_a_recall_near_chance_is_too_early_to_tell(make_run):
    run = read_run(make_run(steps=300, gpu=True))
    for recall, said in ((0.48, "chance would find 43%: too early to tell."), (0.6, "chance would find 43%.")):
        for row in run.of_kind("telemetry"):
            row |= {"choice_recall": recall, "recall_by_chance": 0.43}
        assert f"The choice finds {recall:.0%} of what the exact choice would; {said}" in summarise(run)[1].text


def test_what_a_run_is_taught_decides_whether_it_learned(make_run):
    """The loss on text does not fall where a model follows a frozen one, or an index alone is taught."""
    run = read_run(make_run(steps=300))
    rows = run.of_kind("train")
    for number, row in enumerate(rows):
        row |= {"loss": 1.8 + number / 1000, "divergence": 0.1 - number / 1000}
    learned = summarise(run)[0]
    assert learned.mark == "good" and "nats per token, went from 0.1 to 0.071" in learned.text
    assert [trace["y"][0] for chart in training_charts([run]) if chart.key == "divergence" for trace in chart.traces]
    for number, row in enumerate(rows):
        row["divergence"] = 0.1 + number / 1000
    assert summarise(run)[0].mark == "watch"
    run.config["train"] = {"only": "chooser"}
    for number, row in enumerate(rows):
        row["choice_recall"] = [None, 0.5 + number / 100]
    learned = summarise(run)[0]
    assert learned.mark == "good" and "recall of the choice went from 0.5 to 0.79" in learned.text


def test_only_what_a_run_does_not_have_is_advised(make_run):
    run, settings = make_run(steps=300, gpu=True), {"precision": "bf16", "compile": True}
    larger = {"micro_batch_size": 2, "global_batch_size": 8}
    expected = "Try a larger train.micro_batch_size and train.cuda_graphs: the GPU has room."
    assert expected in advice_on_speed(run, settings | larger)
    text = advice_on_speed(make_run("full", steps=300, gpu=True), settings | {"cuda_graphs": True})
    assert "Find what takes the time of a step with --trace.what profiler" in text
    # Two processes take two rows each.
    run, two = make_run("two", steps=300, gpu=True, ranks=2), {"micro_batch_size": 2, "global_batch_size": 4}
    assert "Try train.cuda_graphs" in advice_on_speed(run, settings | two)
    # If they share their rows, they are one group, which accumulates.
    run = make_run("shared", steps=300, gpu=True, ranks=2)
    with (run / "config.toml").open("a") as config:
        config.write("[parallel]\ncontext = 2\n")
    assert expected in advice_on_speed(run, settings | two)


def advice_on_speed(run, train):
    """The sentence about the speed of a slow run with these settings of training."""
    rewrite_rows(run, lambda row: row.update(executed_mfu=0.05))
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in train.items())
    config = (run / "config.toml").read_text().replace("[train]\n", f"[train]\n{lines}")
    (run / "config.toml").write_text(config)
    return summarise(read_run(run))[3].text


def rewrite_rows(run, change, kinds=("train", "evaluation")):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["kind"] in kinds:
            change(row)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def evaluated(loss):
    return lambda row: row.update(validation_loss=loss(row["step"])) if row["kind"] == "evaluation" else None


def spiking(steps):
    return lambda row: row.update(gradient_norm=100.0 if steps(row["step"]) else 1.0)


@pytest.mark.parametrize(
    ("change", "finding", "mark", "said"),
    [
        (evaluated(lambda step: 2.0 + abs(step - 800) / 1000), 0, "watch", "Stop near step 800"),
        (lambda row: row.update(loss=5.6, validation_loss=5.6), 0, "bad", f"{math.log(257):.3f}"),
        (spiking(lambda step: step % 300 == 0), 1, "watch", "gradient norm spikes"),
        # During the warm-up and the first tenth, gradients are large in every run.
        (spiking(lambda step: step <= 200), 1, "good", "no spikes"),
    ],
)
def test_a_finding_has_its_evidence(make_run, change, finding, mark, said):
    run = make_run(steps=2000)
    rewrite_rows(run, change)
    assert marks(run)[finding] == mark and said in words(run)


def test_longer_training_is_advised_only_at_the_end(make_run):
    run = make_run(steps=2000)
    rewrite_rows(run, evaluated(lambda step: 4.0 - step / 1000))
    assert "Train longer" in words(run)
    (run / "config.toml").write_text((run / "config.toml").read_text().replace("steps = 2000", "steps = 9000"))
    assert "Train longer" not in words(run) and "It is still falling." in words(run)


def test_warnings_and_lost_losses_are_unhealthy(make_run):
    run = make_run(steps=2000)
    with MetricsWriter(run / "metrics.jsonl") as metrics:
        metrics.event(2000, "gate_closed", "layer 3: the compressed gate is closed", severity="warning")
        metrics.write("train", 2001, loss=float("nan"))
        metrics.write("evaluation", 2002, validation_loss=float("inf"))
    assert marks(run)[1] == "bad"
    assert "layer 3: the compressed gate is closed" in words(run)
    assert "the loss is not a number at step 2,001; the validation loss is not a number at step 2,002" in words(run)


def test_what_selection_cannot_choose_is_neither_drawn_nor_praised(make_run):
    run = make_run(steps=300)
    unknown = {"choice_recall": None, "recall_by_chance": None}
    unknown |= {"exact_mass_by_distance": [None] * 6, "held_mass_by_distance": [None] * 6}
    rewrite_rows(run, lambda row: row.update(unknown), ["telemetry"])
    charts = {chart.key: chart for chart in attention_charts(read_run(run))}
    assert not {"recall", "recall_distance"} & set(charts)
    assert "gates are open" in words(run) and "exact choice" not in words(run)


def test_the_choice_is_compared_with_the_exact_one(make_run):
    charts = {chart.key: chart for chart in attention_charts(read_run(make_run(steps=400)))}
    *layers, choice, chance = charts["recall"].traces
    assert len(layers) == 4 and choice["y"] == [0.475, 0.55, 0.625, 0.7] and chance["y"] == [0.35] * 4
    exact, held = charts["recall_distance"].traces
    assert exact["x"] == ["0", "1", "2-3", "4-7", "8-15", "16-31"] and exact["y"] == [0, 0, 0.4, 0.3, 0.2, 0.1]
    assert sum(held["y"]) == pytest.approx(0.7) and held["y"][-1] < exact["y"][-1]


def test_a_phone_stacks_charts_and_scrolls_wide_tables_sideways(make_run, browser):
    names = ("first", "a run with a long name", "another one", "the last of them")
    browser.open(write_report(make_run("alone", steps=300, layers=12)), width=390, theme="dark")
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    lefts = (
        "[...new Set([...document.querySelectorAll('.chart')].map((card) => card.getBoundingClientRect().x))].length"
    )
    assert browser.evaluate(lefts) == 1, "charts stand one below the other"
    runs = [make_run(name, steps=300, learning_rate=1e-3 * number) for number, name in enumerate(names, 1)]
    browser.open(write_report(runs, runs[0].parent / "all.html"), width=390, theme="dark")
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    table = "[...document.querySelectorAll('#side-by-side .scroll')].map((box) => box.scrollWidth > box.clientWidth)"
    assert browser.evaluate(table) == [True, True]
    assert browser.problems == []


def test_a_stopped_run_is_not_a_finished_one(make_run):
    run = make_run(steps=300)
    set_last_beat(run, status="stopped", step=300)
    assert marks(run)[1] == "watch" and "It was stopped at step 300" in words(run)
    assert f"trifocal train --resume {run} continues to its last step." in words(run)


def test_a_dead_rank_and_waiting_for_data_are_said(make_run):
    run = make_run(steps=300)
    totals = {"data": 500.0, "forward": 50.0, "backward": 50.0}
    set_last_beat(run, pid=2**22 + 5, unix_time_seconds=1.7e9, total_seconds=totals)
    assert marks(run)[1] == "bad" and "Rank 0 is dead" in words(run)
    begin = f"Fix the cause; it has no checkpoint: trifocal train {run}/config.toml --overwrite begins again."
    assert marks(run)[3] == "bad" and begin in words(run)
    (run / "checkpoints" / "step_00000300").mkdir(parents=True)
    assert f"Fix the cause; trifocal train --resume {run} continues from the last checkpoint." in words(run)
    set_last_beat(run, status="failed", step=300)
    assert "Rank 0 has failed at step 300" in words(run)
    set_last_beat(run, pid=2**22 + 5, unix_time_seconds=1.7e9, total_seconds=totals)
    assert "summary.md" not in words(run)
    (run / "dumps" / "stalled_step_00000300").mkdir(parents=True)
    (run / "dumps" / "stalled_step_00000300" / "summary.md").write_text("# Rank 0 is stalled")
    assert summarise(read_run(run))[3].text.startswith(f"Read {run}/dumps/stalled_step_00000300/summary.md: ")
    assert marks(run)[2] == "watch" and "time goes to data" in words(run)


def test_time_by_phase_adds_up_over_resumes(make_run):
    run = make_run(steps=300)
    before = read_run(run).phase_seconds()
    set_last_beat(run, pid=1, status="running", total_seconds={"forward": 5.0})
    set_last_beat(run, pid=1, status="finished", total_seconds={"forward": 7.0, "data": 1.0})
    # In a new container of the same name, with the same id.
    set_last_beat(run, pid=1, process_start=5, total_seconds={"forward": 30.0})
    after = read_run(run).phase_seconds()
    assert after["forward"] == before["forward"] + 7.0 + 30.0
    assert after["data"] == before["data"] + 1.0


def test_the_trend_of_a_long_curve_is_its_mean(make_run):
    """Every stretch of a long curve has a spike, which stays when the curve is shortened."""
    run = read_run(make_run(steps=100))
    run.rows = [
        {"kind": "train", "step": step, "step_seconds": 3.1 if step % 100 == 0 else 0.1} for step in range(1, 20_001)
    ]
    [chart] = [chart for chart in training_charts([run]) if chart.key == "step_time"]
    faint, trend = chart.traces
    assert max(faint["y"]) == 3.1 and len(trend["y"]) < 2000 and trend["x"][-1] == 20_000
    assert trend["y"][500] == pytest.approx(0.13, rel=0.1)


def test_thinning_keeps_ends_spikes_and_order():
    values = [1.0] * 100_000
    values[54_321], values[77_777] = 9.0, -9.0
    steps, kept = thin(list(range(100_000)), values, most=1000)
    assert len(kept) <= 1100
    assert steps == sorted(steps) and steps[0] == 0 and steps[-1] == 99_999
    assert dict(zip(steps, kept, strict=True))[54_321] == 9.0 and dict(zip(steps, kept, strict=True))[77_777] == -9.0
    assert thin([1, 2], [3.0, 4.0]) == ([1, 2], [3.0, 4.0])
