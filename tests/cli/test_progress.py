"""Progress of a job as machines and the quiet get it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from in_process import train

from hetsync.cli import train as cli
from hetsync.errors import UserError

MINE = ""
QUICK = ("--run.samples", "640", "--run.evaluate_every", "320", "--run.dir", "run")


@pytest.mark.usefixtures("here")
def test_json_is_an_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--json", *QUICK) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "message"
    assert kinds[1] == "ranks"
    assert kinds[-1] == "end"
    applied = [event["samples_applied"] for event in events if event["event"] == "evaluation"]
    assert applied[0] >= 320
    assert applied[-1] == 640
    assert events[-1]["summary"] == json.loads(Path("run/summary.json").read_text())


@pytest.mark.usefixtures("here")
def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--quiet", *QUICK) == 0
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "")
    assert json.loads(Path("run/summary.json").read_text())["status"] == "finished"


def test_one_of_them() -> None:
    with pytest.raises(UserError, match="--quiet and --json exclude each other"):
        cli.parse(["--quiet", "--json"])


@pytest.mark.usefixtures("here")
def test_a_failure_is_told_and_in_telemetry(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--json", "--optimizer.learning_rate", "1e9", *QUICK) == 2
    out, said = capsys.readouterr()
    last = json.loads(out.splitlines()[-1])
    records = [json.loads(line) for line in Path("run/telemetry/rank-0000.jsonl").read_text().splitlines()]
    (failure,) = [record for record in records if record["kind"] == "failure"]
    assert last == {"event": "failure", "error": failure["error"]}
    assert failure["error"].startswith("UserError: ")
    assert failure["error"].removeprefix("UserError: ") in said
    (profile,) = [record for record in records if record["kind"] == "profile"]
    assert profile["solo_samples_per_second"] > 0
