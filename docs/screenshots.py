"""Takes the pictures of the guide: `python docs/screenshots.py RUN`, of a run folder, into docs/images.

Needs playwright, of the extra `test`, and Chromium.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from hetsync.report.page import page_of

IMAGES = Path(__file__).parent / "images"
LARGEST_BYTES = 150_000
SHOTS = {"report.png": (1100, 900, "light"), "report-phone.png": (390, 800, "dark")}


def take(run: Path) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        page = Path(folder) / "report.html"
        page.write_text(page_of([run]), encoding="utf-8")
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (width, height, scheme) in SHOTS.items():
            shown = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            shown.goto(page.as_uri())
            shown.wait_for_selector("body[data-ready]", timeout=60_000)
            shown.wait_for_function("Bokeh.documents.every(each => each.is_idle)", timeout=60_000)
            shown.wait_for_timeout(500)
            shown.screenshot(path=IMAGES / name)
            size = (IMAGES / name).stat().st_size
            if size > LARGEST_BYTES:
                sys.exit(f"{name} has {size} bytes: show less, for at most {LARGEST_BYTES}")
            print(f"{IMAGES / name}: {size} bytes")
        browser.close()


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    take(Path(sys.argv[1]))
