"""Takes the pictures of the guide, into docs/images:

    python docs/screenshots.py [--run RUN] [--predictions RUN] [TERMINAL.txt ...]

The page of a run folder, the predictions of one, and what terminals have shown (kept with its colours: `tmux
capture-pane -ep`), each as a picture of its file's name. Needs playwright, of the extra `test`, and Chromium.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from hetsync.report.page import page_of

IMAGES = Path(__file__).parent / "images"
LARGEST_BYTES = 150_000
PREDICTIONS_HEIGHT = 1070
SHOTS = {"report.png": (1100, 900, "light"), "report-phone.png": (390, 800, "dark")}
TERMINAL = """<body style="margin: 0"><pre style="display: inline-block; margin: 0; padding: 14px 18px;
color: {foreground}; background: {background}; font: 13px/1.4 'DejaVu Sans Mono', monospace">{code}</pre></body>"""


def shoot_page(browser: Any, run: Path) -> None:
    for name, (width, height, scheme) in SHOTS.items():
        opened(browser, run, width, height, scheme).screenshot(path=IMAGES / name)
        check(IMAGES / name)


def shoot_predictions(browser: Any, run: Path) -> None:
    """Down to its tables."""
    shown = opened(browser, run, 1100, 3000, "light")
    part = shown.locator("[data-part=predictions]").bounding_box()
    image = IMAGES / "predictions.png"
    shown.screenshot(path=image, clip={**part, "height": min(part["height"], PREDICTIONS_HEIGHT)}, full_page=True)
    check(image)


def opened(browser: Any, run: Path, width: int, height: int, scheme: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        page.write_text(page_of([run]), encoding="utf-8")
        shown = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        shown.goto(page.as_uri())
        shown.wait_for_selector("body[data-ready]", timeout=60_000)
        shown.wait_for_function("Bokeh.documents.every(each => each.is_idle)", timeout=60_000)
        shown.wait_for_timeout(500)
        return shown


def shoot_terminal(browser: Any, told: Path) -> None:
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(Text.from_ansi(told.read_text(encoding="utf-8").rstrip()), soft_wrap=True)
    shown = browser.new_page(device_scale_factor=1.25)
    shown.set_content(console.export_html(theme=MONOKAI, inline_styles=True, code_format=TERMINAL))
    image = IMAGES / f"{told.stem}.png"
    shown.locator("pre").screenshot(path=image)
    check(image)


def check(image: Path) -> None:
    size = image.stat().st_size
    if size > LARGEST_BYTES:
        sys.exit(f"{image.name} has {size} bytes: show less, for at most {LARGEST_BYTES}")
    print(f"{image}: {size} bytes")


def take(run: Path | None, predictions: Path | None, terminals: Sequence[Path]) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("there is no Chromium: install it (apt install chromium)")
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        if run is not None:
            shoot_page(browser, run)
        if predictions is not None:
            shoot_predictions(browser, predictions)
        for told in terminals:
            shoot_terminal(browser, told)
        browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--predictions", metavar="RUN", type=Path)
    parser.add_argument("terminals", metavar="TERMINAL.txt", type=Path, nargs="*")
    told = parser.parse_args()
    take(told.run, told.predictions, told.terminals)
