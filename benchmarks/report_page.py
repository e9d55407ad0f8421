"""What the page of a long run costs: seconds to make it, its megabytes, and seconds until a browser shows and zooms it.

    python -m benchmarks.report_page [--run FOLDER ...]

Without --run of two simulated runs: 64 ranks, and an hour of eight. Needs Chromium, and playwright of the extra `test`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from benchmarks.common.report import source
from hetsync.report.page import page_of

RUNS = {
    "64 ranks": "--emulate heavy-jitter --ranks 64 --data.batch_size 2048 --run.samples 4000000",
    "an hour of 8 ranks": "--emulate quickstart --emulation.samples_per_second 640 --run.samples 2304000",
}
PATIENCE = 120_000  # milliseconds for the browser
SHOWN = "document.body.dataset.ready && Bokeh.documents.every(each => each.is_idle)"
# The middle tenth of the timeline; resolves once the frame after the redrawn one has come.
ZOOM = """async () => {
    const plot = Bokeh.documents[0].get_model_by_name('timeline'), {start, end} = plot.x_range
    const began = performance.now(), frame = () => new Promise(requestAnimationFrame)
    plot.x_range.setv({start: start + 0.45 * (end - start), end: start + 0.55 * (end - start)})
    await frame(); await frame(); await frame()
    return (performance.now() - began) / 1000
}"""


@dataclass(frozen=True)
class Cost:
    telemetry_bytes: int
    make_cpu_seconds: float
    page_bytes: int
    open_seconds: float
    zoom_seconds: float


def simulate(words: str, folder: Path) -> None:
    command = [Path(sys.executable).parent / "hetsync", "simulate", *words.split(), "--run.dir", folder]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def cost_of(run: Path, browser: Any, page: Path) -> Cost:
    began = time.process_time()
    page.write_text(page_of([run]), encoding="utf-8")
    made = time.process_time() - began
    telemetry = sum(path.stat().st_size for path in (run / "telemetry").iterdir())
    shown = browser.new_page(viewport={"width": 1280, "height": 900})
    began = time.monotonic()
    shown.goto(page.as_uri())
    shown.wait_for_function(SHOWN, timeout=PATIENCE)
    opened = time.monotonic() - began
    zoomed = shown.evaluate(ZOOM)
    shown.close()
    return Cost(telemetry, made, page.stat().st_size, opened, zoomed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, action="append", help="a run folder of yours, in place of simulated runs")
    told = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("there is no Chromium: install it (apt install chromium)")
    print("| run | telemetry, MB | to make, s of CPU | page, MB | to open, s | to zoom, s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        runs = {str(run): run for run in told.run} if told.run else {name: Path(scratch, name) for name in RUNS}
        for name, run in runs.items():
            if not told.run:
                simulate(RUNS[name], run)
            cost = cost_of(run, browser, Path(scratch, "report.html"))
            sizes = f"{cost.telemetry_bytes / 1e6:.1f} | {cost.make_cpu_seconds:.1f} | {cost.page_bytes / 1e6:.1f}"
            print(f"| {name} | {sizes} | {cost.open_seconds:.1f} | {cost.zoom_seconds:.2f} |", flush=True)
        browser.close()
    print(source("report_page"))


if __name__ == "__main__":
    main()
