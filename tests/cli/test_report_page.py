"""`hetsync report`, `trace` and `top`: in one process; and the page as a browser shows it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_folders import death, round_of, start, task, tasks, write_lines, write_summary

from hetsync.cli import main as cli

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
RANKS, TASKS = 3, 40
WIDTHS = {"desktop": 1280, "phone": 390}


def hetsync(*words: str | Path) -> None:
    cli.main([*map(str, words)])


def make_run(folder: Path) -> Path:
    """Three ranks, of which the last waits for data; evaluations, decisions, a failure, and a second start."""
    told = [
        {
            "kind": "evaluation",
            "at": at,
            "samples_applied": round(at * 300),
            "train_seconds": at,
            "accuracy": at / 10,
            "$$a$$": 1.0,
        }
        for at in (1.0, 2.0, 3.0)
    ]
    decisions = [
        {"kind": "control", "at": at, "decision": {"accumulation": k, "delay_bound": d, "quorum": 0.25}, "reason": why}
        for at, k, d, why in ((1.5, 2, 4, "rounds are dear <&>"), (3.0, 4, 8, "so they are"))
    ]
    told[0] |= {"perplexity": "inf", "loss": "inf"}
    told[2]["loss"] = 0.5
    raised = {"round": 30, "accumulation": 8, "work": 0.4, "waits": 0.0, "reason": "K = 8"}
    decisions.append({"kind": "rounds_change", "at": 3.5, **raised})
    failure = {"kind": "failure", "at": 4.0, "error": "LostError: rank 1 does not answer"}
    for rank in range(RANKS):
        work = tasks(TASKS, compute=0.08, data=0.02) if rank == 2 else tasks(TASKS)
        rounds = [round_of(0.1 * number, 0.01, number % 3) for number in range(1, TASKS + 1)]
        others = [*told, *decisions, failure] if rank == 0 else []
        write_lines(folder, rank, [*start(), *work, *rounds, *others])
        write_lines(folder, rank, [*start("2026-11-02T15:00:00+00:00"), task(0.2)])
    device = {
        "host": "node",
        "device": "cpu",
        "share": 10,
        "solo_samples_per_second": 100.0,
        "runtime_cpu_fraction": 0.01,
    }
    parts = {"compute_fraction": 0.8, "wait_fraction": 0.0, "data_fraction": 0.2}
    write_summary(
        folder,
        status="finished",
        ranks=RANKS,
        samples_applied=1230,
        samples_expected=1230,
        samples_per_second=287.125,
        efficiency=0.957,
        solo_fraction=0.961,
        solo_fraction_interval=[0.938, 0.976],
        delay_bound=8,
        accumulation=4,
        staleness={"mean": 1.5, "max": 3, "histogram": {"1": 60, "2": 62}},
        metrics={"accuracy": 0.4321},
        per_rank=[{"rank": rank, **device, **parts} for rank in range(RANKS)],
    )
    (folder / "recipe.yaml").write_text("sync: {delay_bound: 4, accumulation: 1}\nmodel: {name: mine}\n")
    return folder


def page_of(*words: str | Path) -> Path:
    pytest.importorskip("bokeh", reason="bokeh is not installed")
    output = Path(words[0]) / "report.html"
    hetsync("report", *words)
    return output


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    with pytest.raises(SystemExit) as ended:
        hetsync(*words)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


# Without a browser.


@pytest.mark.parametrize("verb", ["report", "trace", "top"])
def test_what_is_no_run_is_one_sentence(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if verb == "report":
        pytest.importorskip("bokeh", reason="bokeh is not installed")
    assert "there is no run folder missing: give one" in refused(capsys, verb, "missing")
    assert f"{tmp_path} holds no run" in refused(capsys, verb, tmp_path)


def test_a_page_that_cannot_be_written_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bokeh", reason="bokeh is not installed")
    run = make_run(tmp_path / "run")
    (tmp_path / "file").touch()
    told = refused(capsys, "report", run, "--output", tmp_path / "file" / "page.html")
    assert "cannot write" in told
    assert "choose another --output" in told


def test_a_page_needs_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = page_of(make_run(tmp_path / "run")).read_text()
    assert "<script src" not in page
    assert "<link" not in page
    assert "rounds are dear &lt;&amp;&gt;" in page
    assert f"{tmp_path}/run/report.html: 1." in capsys.readouterr().out


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    write_summary(tmp_path / "run")
    assert "What limited this run" in page_of(tmp_path / "run").read_text()
    write_lines(tmp_path / "run", 0, start())
    assert "What limited this run" in page_of(tmp_path / "run").read_text()


@pytest.mark.parametrize("evaluations", [1, 2])
def test_a_metric_that_was_found_once_is_a_tile_and_no_figure(tmp_path: Path, evaluations: int) -> None:
    told = [
        {"kind": "evaluation", "at": at, "samples_applied": 30, "train_seconds": at, "accuracy": 0.5}
        for at in range(1, 1 + evaluations)
    ]
    write_lines(tmp_path, 0, [*start(), *tasks(10), *told])
    write_summary(tmp_path, metrics={"accuracy": 0.5})
    page = page_of(tmp_path).read_text()
    assert 'data-key="metric-accuracy"' in page
    assert ("Evaluated: accuracy" in page) == (evaluations > 1)


def make_outlived(folder: Path) -> Path:
    """Rank 0 dies at 2.5 s, another process takes its place at 4 s, and rank 1 leads from then on."""
    told = [{"kind": "evaluation", "at": at, "samples_applied": 300 * at, "train_seconds": at} for at in range(1, 5)]
    evaluations = [{**each, "accuracy": each["train_seconds"] / 10} for each in told]
    rests = [{"kind": "rest", "at": at, "reason": "checkpoint", "seconds": 0.5} for at in (2.0, 3.0)]
    others = [
        death(2.5, 0),
        {"kind": "damage", "at": 2.6, "rank": 2, "round": 41, "recovered_seconds": 0.25},
        {"kind": "left_out", "at": 2.7, "rank": 2, "round": 42, "samples": 32},
        {"kind": "rollback", "at": 2.8, "cause": "books_lost", "rank": 0, "samples": 640, "checkpoint_samples": 1280}
        | {"round": 40, "next_round": 43},
        {"kind": "join", "at": 4.0, "rank": 0, "host": "spare", "round": 50, "seconds": 1.5},
        death(5.0, 2, cause="silent", samples_returned=0),
        {"kind": "control", "at": 5.5, "died": "was ended by SIGKILL"},
    ]
    again = [*start("2026-11-02T14:00:04+00:00", host="spare", share=7), *tasks(10)]
    write_lines(folder, 0, [*start(), *tasks(20), *evaluations[:2], rests[0], *again])
    write_lines(folder, 1, [*start(), *tasks(40), *rests, *evaluations[2:], *others])
    write_lines(folder, 2, [*start(), *tasks(40), *rests])
    write_summary(folder, ranks=2, ranks_at_start=3)
    return folder


def cells(page: Path, table: str) -> list[list[str]]:
    (body,) = re.findall(rf'<table data-table="{table}">.*?</table>', page.read_text(), re.DOTALL)
    return [re.findall(r"<td.*?>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)[1:]]


def test_what_has_befallen_ranks_is_listed(tmp_path: Path) -> None:
    told = [
        ("0", "died: the others went on from round 40, and 16 samples of it went out again"),
        ("2", "a message of it came damaged or not at all: round 41 began anew, after 0.25 s"),
        ("2", "gradients were not finite in round 42: its 32 samples were left out"),
        (
            "all",
            "back to the checkpoint of 1,280 samples, as all ranks that kept the books had died: 640 samples were"
            " trained on again",
        ),
        ("0", "another process, on spare, took its place from round 50 on"),
        ("2", "was excluded, as it was silent: the others went on from round 40"),
        ("1", "the controller was ended by SIGKILL"),
    ]
    events = [tuple(row[1:]) for row in cells(page_of(make_outlived(tmp_path)), "events")]
    assert [event for event in events if event[1].startswith("at rest")] == [
        ("all", "at rest (checkpoint, 0.50 s)"),
        ("all", "at rest (checkpoint, 0.50 s)"),
    ]
    assert [event for event in events if event in told] == told


def test_the_successor_of_rank_0_has_its_evaluations_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bokeh", reason="bokeh is not installed")
    from hetsync.report import page

    drawn: dict[str, list[float]] = {}

    def lines_figure(title: str, lines: Any, *words: Any, **options: Any) -> Any:
        drawn[title] = [*lines[0].y]
        return figure(title, lines, *words, **options)

    figure = page.lines_figure
    monkeypatch.setattr(page, "lines_figure", lines_figure)
    page_of(make_outlived(tmp_path))
    assert drawn["Evaluated: accuracy"] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_of_a_rank_that_was_replaced_the_living_one_is_told(tmp_path: Path) -> None:
    run = make_outlived(tmp_path)
    assert cells(page_of(run), "ranks")[0][:4] == ["0", "spare", "cpu", "7"]
    living = {"rank": 0, "host": "spare", "device": "cpu", "share": 12, "joined_at_round": 50}
    dead = {"rank": 0, "host": "node", "device": "cpu", "share": 0, "left_at_round": 40}
    write_summary(run, status="finished", ranks=2, ranks_at_start=3, per_rank=[living, dead])
    assert cells(page_of(run), "ranks")[0][:4] == ["0", "spare", "cpu", "12"]


def test_ranks_of_an_earlier_start_are_no_sign_of_lost_telemetry(tmp_path: Path) -> None:
    for rank in range(3):
        write_lines(tmp_path, rank, [*start(), *tasks(10)])
    lost = "Not every rank has left its telemetry."
    write_summary(tmp_path, ranks=2, ranks_at_start=2)
    assert lost not in page_of(tmp_path).read_text()
    write_summary(tmp_path, ranks=2, ranks_at_start=4)
    assert lost in page_of(tmp_path).read_text()


def test_a_simulated_run_has_all_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    with pytest.raises(SystemExit):
        hetsync("simulate", "--emulate", "quickstart", "--run.dir", run, "--run.samples", "2000")
    assert page_of(run).stat().st_size > 1e6
    hetsync("trace", run)
    trace = json.loads((run / "trace.json").read_text())
    computed = sum(e["dur"] for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] == "computing")
    lines = [json.loads(x) for path in (run / "telemetry").iterdir() for x in path.read_text().splitlines()]
    assert computed / 1e6 == pytest.approx(sum(x["compute_seconds"] for x in lines if x["kind"] == "piece"), abs=1e-3)
    capsys.readouterr()
    hetsync("top", run)
    table = capsys.readouterr().out
    assert "finished: 2,000 of 2,000 samples" in table
    assert len(table.splitlines()) == 2 + len(list((run / "telemetry").iterdir()))


def test_top_counts_what_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path, 0, [*start(), *tasks(10), {"kind": "piece", "at": 1.1}])
    hetsync("top", "--once", tmp_path)
    assert "lines of telemetry that cannot be read: 1" in capsys.readouterr().out


def test_top_shows_a_failure_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = "E: [enforce fail] in [/data]"
    write_lines(tmp_path, 0, [*start(), {"kind": "failure", "at": 1.0, "error": error}])
    hetsync("top", "--once", tmp_path)
    assert f"failed: {error}" in capsys.readouterr().out


# In a browser.


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Shown:
    """A page that is open, with what went wrong on it."""

    def __init__(self, browser: Any, path: Path, width: int = 1280, scheme: str = "light") -> None:
        self.wrong: list[str] = []
        self._context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = page = self._context.new_page()
        page.on("console", lambda told: self.wrong.append(told.text) if told.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("request", lambda asked: self._asked(asked.url))
        page.goto(path.resolve().as_uri())
        page.wait_for_selector("body[data-ready]", timeout=60_000)
        page.wait_for_function("Bokeh.documents.every(each => each.is_idle)", timeout=60_000)
        page.wait_for_function(f"({IN_SIGHT}).length > 0", timeout=60_000)

    def _asked(self, url: str) -> None:
        if not url.startswith(("file:", "blob:", "data:")):
            self.wrong.append(url)

    def told(self, script: str) -> Any:
        return self.page.evaluate(script)

    def column(self, name: str, column: str) -> list[float]:
        """Of a source on the page; nan is None."""
        find = f"[...Bokeh.documents[0].all_models].find(m => m.name === '{name}' && m.type === 'ColumnDataSource')"
        found: list[float] = self.told(f"Array.from({find}.data['{column}'])")
        return found

    def close(self) -> None:
        self._context.close()


IN_SIGHT = """[...Bokeh.documents[0].all_models].filter(m => m.name === 'in sight').flatMap(
    m => Array.from(m.data.what, (what, row) => ({what, ...Object.fromEntries(
        ['rank', 'left', 'right', 'seconds'].map(name => [name, m.data[name][row]]))})))"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_of(make_run(tmp_path_factory.mktemp("runs") / "run"))


@pytest.mark.each_value
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_and_nothing_is_wrong(browser: Any, path: Path, width: str, scheme: str) -> None:
    shown = Shown(browser, path, WIDTHS[width], scheme)
    assert shown.wrong == []
    assert shown.told("document.documentElement.scrollWidth") == WIDTHS[width]
    (colours,) = {tuple(each) for each in shown.told(AXIS_COLOURS)}
    assert colours[0] == colours[1]
    assert (int(colours[0][1:3], 16) > 128) == (scheme == "dark")
    shown.close()


AXIS_COLOURS = """[...Bokeh.documents[0].all_models].filter(m => m.type === 'LinearAxis').map(
    m => [m.major_label_text_color, getComputedStyle(document.documentElement).getPropertyValue('--soft').trim()])"""


def test_its_values_are_those_of_the_files(browser: Any, path: Path) -> None:
    shown = Shown(browser, path)
    tiles = dict(
        shown.told("[...document.querySelectorAll('[data-key]')].map(t => [t.dataset.key, t.children[0].innerText])")
    )
    assert tiles == {
        "status": "finished",
        "efficiency": "0.957",
        "solo_fraction": "0.961",
        "samples_per_second": "287.1",
        "samples": "1,230",
        "seconds": "4.2 s",
        "staleness": "1.50",
        "metric-accuracy": "0.4321",
    }
    limits = shown.told("[...document.querySelectorAll('.limits li')].map(each => each.innerText)")
    assert limits == ["Rank 2 waits 19% of the time for data: more data.workers."]
    decisions = shown.told(
        "[...document.querySelectorAll('[data-table=decisions] tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
    )
    assert [row[1:] for row in decisions] == [
        ["2", "4", "rounds are dear <&>"],
        ["4", "8", "so they are"],
        ["8", "8", "K = 8"],
    ]
    events = shown.told("document.querySelector('[data-table=events]').innerText")
    assert "failed: LostError: rank 1 does not answer" in events
    assert "the job was started again" in events
    assert len(shown.column("tasks", "compute")) == RANKS * (TASKS + 1)
    assert sum(shown.column("tasks", "compute")) == pytest.approx(2 * (TASKS + 1) * 0.1 + TASKS * 0.08 + 0.1, rel=1e-5)
    assert sum(shown.column("efficiency", "y")) > 0
    assert shown.column("accuracy", "y") == [0.1, 0.2, 0.3]
    assert shown.column("loss", "y") == [0.5], "without what is infinite"
    assert shown.column("histogram", "top") == [60, 62]
    assert shown.column("K", "y") == [1, 2, 4, 8, 1, 1], "those of both starts, and what was decided"
    assert shown.wrong == []
    shown.close()


def test_the_timeline_tells_each_task_in_its_place(browser: Any, path: Path) -> None:
    shown = Shown(browser, path)
    pieces = [each for each in shown.told(IN_SIGHT) if each["rank"] == 2]
    computing = [each for each in pieces if each["what"] == "computing"]
    assert [each["left"] for each in computing[:TASKS]] == pytest.approx(
        [0.1 * number + 0.02 for number in range(TASKS)], abs=1e-5
    )
    assert all(each["right"] - each["left"] == pytest.approx(0.08, abs=1e-5) for each in computing[:TASKS])
    assert sum(each["seconds"] for each in pieces if each["what"] == "loading") == pytest.approx(0.02 * TASKS, rel=1e-4)
    assert sum(each["what"] == "communicating" for each in pieces) == TASKS
    assert shown.told("document.querySelector('[data-table=ranks]').rows[3].cells[8].innerText") == "19.0%"
    shown.close()


@pytest.mark.thorough
def test_thousands_of_slices_of_64_ranks_are_few_rectangles(browser: Any, tmp_path: Path) -> None:
    """Together where all are in sight, one by one where the range is narrow."""
    for rank in range(64):
        write_lines(tmp_path, rank, [*start(), *tasks(2000, compute=0.1, wait=0.01 * (rank % 2))])
    shown = Shown(browser, page_of(tmp_path))
    everything = shown.told(IN_SIGHT)
    assert 2000 < len(everything) <= 24_000
    whole = sum(each["seconds"] for each in everything if each["what"] == "computing")
    assert whole == pytest.approx(64 * 2000 * 0.1, rel=1e-4)
    shown.told("{ const r = Bokeh.documents[0].get_model_by_name('timeline').x_range; r.start = 10.02; r.end = 10.58 }")
    shown.page.wait_for_function(f"({IN_SIGHT}).length < 2000", timeout=60_000)
    first = [each for each in shown.told(IN_SIGHT) if each["rank"] == 0]
    assert [each["left"] for each in first] == pytest.approx([10.0, 10.1, 10.2, 10.3, 10.4, 10.5], abs=1e-4)
    assert shown.wrong == []
    shown.close()


@pytest.mark.thorough
def test_runs_are_compared(browser: Any, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in ("one", "other")]
    shown = Shown(browser, page_of(*runs))
    rows = shown.told(
        "[...document.querySelectorAll('[data-table=comparison] tbody tr')].map(r => r.innerText.split('\\t'))"
    )
    assert [row[:6] for row in rows] == [[name, "finished", "3", "8", "4", "0.957"] for name in ("one", "other")]
    assert shown.told("document.querySelectorAll('article').length") == 2
    assert shown.wrong == []
    shown.close()
