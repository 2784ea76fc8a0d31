"""Take the pictures of a report and of the server's page: `python docs/figures/screenshot.py RUN_DIR`.

Needs Chromium, and a run whose sequences are long enough that selection has a choice. The report on the page is of
`make demo` with 600 steps; the server has the model of the package.
"""

import bisect
import inspect
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.report.browser import Browser, find  # noqa: E402
from tests.serve.servers import serving  # noqa: E402
from trifocal.report import write_report  # noqa: E402
from trifocal.train.checkpoint.pretrained import DEMO_FOLDER, open_pretrained  # noqa: E402

WIDTH = 1080
# Functions of a module: more tokens than the chosen blocks cover, and room for an answer.
_SOURCE = inspect.getsource(bisect)
_NEXT = "def bisect_left(a, x, lo=0, hi=None, *, key=None):\n"
_PROMPT = _SOURCE[: _SOURCE.index(_NEXT)][-1400:] + _NEXT


def shoot(run: Path, target: Path) -> None:
    """Write a report of a run and save its top and its attention picture as PNG."""
    executable = find()
    if executable is None:
        raise SystemExit("no Chromium is installed")
    with tempfile.TemporaryDirectory() as folder, Browser(executable, Path(folder)) as browser:
        page = write_report(run, Path(folder) / "report.html")
        browser.open(page, width=WIDTH, height=1400)
        # The charts in between are left out, so that the picture fits a page.
        browser.evaluate(
            """(() => {
              document.getElementById('training').remove();
              const attention = document.getElementById('attention');
              attention.querySelector('.charts').remove();
              while (attention.nextElementSibling) attention.nextElementSibling.remove();
              for (const part of document.querySelectorAll('nav, .tiles, #attention h2')) part.remove();
              attention.style.marginTop = '14px';
              document.querySelector('.reader pre.text').style.maxHeight = '250px';
              const row = document.querySelector('.picture .row');
              row.value = Math.round(0.8 * row.max);
              row.dispatchEvent(new Event('input'));
            })()"""
        )
        time.sleep(1)
        height = browser.evaluate("document.querySelector('.picture').getBoundingClientRect().bottom + scrollY + 24")
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
        browser.screenshot(target, clip=clip)


def shoot_server(target: Path) -> None:
    """Serve the model of the package, let it continue a text on the page, and save the page as PNG."""
    executable = find()
    if executable is None:
        raise SystemExit("no Chromium is installed")
    found = open_pretrained(DEMO_FOLDER)
    model, tokenizer, length = found.model(), found.tokenizer(), found.sequence_length()
    with (
        serving(model.eval(), tokenizer, max_length=length or 512, name="demo") as served,
        tempfile.TemporaryDirectory() as folder,
        Browser(executable, Path(folder)) as browser,
    ):
        browser.open(served.url, width=900)
        browser.evaluate("document.getElementById('temperature').value = 0.8")
        browser.evaluate("document.getElementById('length').value = 250")
        browser.call("Input.insertText", text=_PROMPT)
        browser.press("Enter", control=True)
        browser.wait_for("document.documentElement.dataset.answers")
        # The prompt's beginning is left out, so that the picture fits a page.
        browser.evaluate(
            """(() => {
              for (const part of document.querySelectorAll('#talk > *, #read')) {
                part.style.maxHeight = '300px';
                part.style.overflow = 'hidden';
                part.scrollTop = part.scrollHeight;
              }
            })()"""
        )
        browser.screenshot(target)


if __name__ == "__main__":
    shoot(Path(sys.argv[1]), ROOT / "docs/figures/report.png")
    shoot_server(ROOT / "docs/figures/serving.png")
