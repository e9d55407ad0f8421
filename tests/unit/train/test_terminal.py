"""What is told while a job runs: to people, to machines, and to nobody."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from hetsync.balance.profile import RankProfile, StepTime
from hetsync.train.display import make_display
from hetsync.train.json_lines import JsonLines
from hetsync.train.terminal import Progress, Terminal

DEVICE = RankProfile("cpu", "node", StepTime(0.0, 0.1), False)


def moment(**fields: Any) -> Progress:
    told: dict[str, Any] = {
        "samples_applied": 3000,
        "samples_expected": 10_000,
        "already": 1000,
        "seconds": 20.0,
        "loss": 0.5,
        "staleness": 1.25,
        "capable": 125.0,
        "slowest": (2, 0.6),
    }
    return Progress(**{**told, **fields})


def line(progress: Progress) -> str:
    text = io.StringIO()
    Terminal(10_000, console=Console(file=text, soft_wrap=True)).progress(progress)
    return text.getvalue().strip()


def test_a_line_names_the_slowest_rank_and_what_is_left() -> None:
    assert line(moment()) == (
        "3,000/10,000  100/s  efficiency 0.800  loss 0.5000  staleness 1.2  rank 2 slowest, at 60% of its profile"
        "  70 s left"
    )


@pytest.mark.parametrize("slowest", [None, (2, 0.95)])
def test_where_no_rank_is_slow_none_is_named(slowest: tuple[int, float] | None) -> None:
    assert "slowest" not in line(moment(slowest=slowest))


def test_what_is_not_known_is_left_out() -> None:
    told = line(moment(samples_applied=1000, loss=None, capable=None, slowest=None))
    assert told == "1,000/10,000  0/s  staleness 1.2"


@pytest.mark.parametrize(("samples", "left"), [(40_000, "6 min left"), (1_000_000, "2.8 h left")])
def test_long_times_are_in_minutes_and_hours(samples: int, left: str) -> None:
    assert line(moment(samples_expected=samples)).endswith(left)


@pytest.mark.parametrize("text", ["[epoch 3] loss 0.5", "read [/data/x]", "runs/x[lr=0.1] :smile:"])
def test_text_is_shown_as_it_is(capsys: pytest.CaptureFixture[str], text: str) -> None:
    Terminal(10).say(text)
    assert capsys.readouterr().out == f"{text}\n"


def test_machines_get_an_object_a_line() -> None:
    stream = io.StringIO()
    display = JsonLines(stream)
    display.ranks([DEVICE], [64], [10.0])
    display.progress(moment())
    display.evaluated("evaluated after 3,000 samples", 3000, {"accuracy": 0.5})
    display.say("the run folder is runs/x")
    display.close({"status": "finished"})
    ranks, progress, evaluation, message, end = map(json.loads, stream.getvalue().splitlines())
    rank = {"rank": 0, "host": "node", "device": "cpu", "share": 64, "solo_samples_per_second": 10.0}
    assert ranks == {"event": "ranks", "ranks": [rank]}
    assert progress == {
        "event": "progress",
        "samples_applied": 3000,
        "samples_expected": 10_000,
        "seconds": 20.0,
        "loss": 0.5,
        "staleness": 1.25,
        "samples_per_second": 100.0,
        "efficiency": 0.8,
        "seconds_left": 70.0,
        "slowest_rank": 2,
        "slowest_rank_speed": 0.6,
    }
    assert evaluation == {"event": "evaluation", "samples_applied": 3000, "metrics": {"accuracy": 0.5}}
    assert message == {"event": "message", "text": "the run folder is runs/x"}
    assert end == {"event": "end", "summary": {"status": "finished"}}


def test_machines_read_no_infinities() -> None:
    stream = io.StringIO()
    display = JsonLines(stream)
    display.evaluated("evaluated", 3000, {"perplexity": float("inf")})
    display.close({"status": "finished", "metrics": {"loss": float("nan")}})
    evaluation, end = [json.loads(text, parse_constant=pytest.fail) for text in stream.getvalue().splitlines()]
    assert evaluation["metrics"] == {"perplexity": "inf"}
    assert end["summary"]["metrics"] == {"loss": "nan"}


def test_a_reader_that_has_gone_ends_no_job() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    JsonLines(Gone()).say("nobody hears")


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    display = make_display("nothing", 100, 0)
    display.progress(moment())
    display.say("something")
    display.close({})
    assert capsys.readouterr().out == ""
