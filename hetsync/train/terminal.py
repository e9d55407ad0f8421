"""What rank 0 shows: a table of ranks, one live line, a closing summary. Plain lines where there is no terminal."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol, TextIO, cast

from rich import progress as bars
from rich.console import Console
from rich.table import Table

from hetsync.balance.profile import RankProfile
from hetsync.balance.shares import equal_share_ceiling
from hetsync.console import plain_console
from hetsync.launchers import launched_by_mpi
from hetsync.train import efficiency

LINE_SECONDS = 10.0  # between plain lines
REFRESH_SECONDS = 0.25
NOTABLY_SLOW = 0.9  # part of its profiled speed, below which the slowest rank is named


def watched() -> bool:
    """Does a person look on? mpirun gives its ranks a terminal of its own, whatever its output goes to."""
    terminal = sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()
    if not terminal or not launched_by_mpi():
        return terminal
    try:
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


@dataclass(frozen=True)
class Progress:
    """A moment of training.

    Args:
        samples_applied, samples_expected: By now and in all, if that is known, earlier parts of the run included.
        already: Of these, applied by earlier parts.
        seconds: Of training, by this process.
        loss: Mean since the last moment; None where no task was finished.
        staleness: Mean, in rounds.
        capable: Samples/s that the devices were capable of so far; None where that is not known yet.
        slowest: The rank that computes slowest against its profile, and its speed as a part of that.
    """

    samples_applied: int
    samples_expected: int | None
    already: int
    seconds: float
    loss: float | None
    staleness: float
    capable: float | None
    slowest: tuple[int, float] | None

    @property
    def rate(self) -> float:
        """Samples/s."""
        return (self.samples_applied - self.already) / self.seconds if self.seconds else 0.0

    @property
    def efficiency(self) -> float | None:
        return self.rate / self.capable if self.capable else None

    @property
    def seconds_left(self) -> float | None:
        if self.samples_expected is None or not self.rate:
            return None
        return (self.samples_expected - self.samples_applied) / self.rate


class Display(Protocol):
    """What the trainer tells of; ranks other than 0 get `Silence`."""

    def ranks(self, profiles: Sequence[RankProfile], shares: Sequence[int], rates: Sequence[float] | None) -> None: ...

    def progress(self, progress: Progress) -> None: ...

    def due(self) -> bool: ...

    def evaluated(self, sentence: str, applied: int, metrics: Mapping[str, float]) -> None: ...

    def say(self, text: str) -> None: ...

    def failed(self, error: str) -> None: ...

    def close(self, summary: Mapping[str, Any] | None) -> None: ...


class Silence:
    def ranks(self, profiles: Sequence[RankProfile], shares: Sequence[int], rates: Sequence[float] | None) -> None: ...

    def progress(self, progress: Progress) -> None: ...

    def due(self) -> bool:
        return False

    def evaluated(self, sentence: str, applied: int, metrics: Mapping[str, float]) -> None: ...

    def say(self, text: str) -> None: ...

    def failed(self, error: str) -> None: ...

    def close(self, summary: Mapping[str, Any] | None) -> None: ...


class Forgiving:
    """Standard output that may be full, or closed, while training goes on, or before (None, as Python has it)."""

    def __init__(self, stream: TextIO | None) -> None:
        gone = stream is None or stream.closed
        self._stream: TextIO = open(os.devnull, "w") if gone else stream  # type: ignore[assignment]  # noqa: SIM115

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Nobody reads a closed pipe any more: what is left goes nowhere, also at the process's end."""
        if isinstance(error, BrokenPipeError):
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Terminal:
    def __init__(self, total_samples: int | None, already_applied: int = 0, console: Console | None = None) -> None:
        self._console = console or plain_console(
            file=cast(IO[str], Forgiving(sys.stdout)), soft_wrap=True, force_terminal=watched()
        )
        self._total = total_samples
        self._already = already_applied
        self._shown_at = time.monotonic()
        self._loss: float | None = None
        self._bar: bars.Progress | None = None
        self._task: bars.TaskID | None = None

    def ranks(self, profiles: Sequence[RankProfile], shares: Sequence[int], rates: Sequence[float] | None) -> None:
        table = Table("rank", "host", "device", "solo samples/s", "share")
        told = ["not measured"] * len(profiles) if rates is None else [f"{rate:,.1f}" for rate in rates]
        for rank, (profile, share, rate) in enumerate(zip(profiles, shares, told, strict=True)):
            table.add_row(str(rank), profile.host, profile.device, rate, str(share))
        self._console.print(table)

    def due(self) -> bool:
        """Is it time for another `progress`?"""
        interval = REFRESH_SECONDS if self._console.is_terminal else LINE_SECONDS
        return time.monotonic() > self._shown_at + interval

    def progress(self, progress: Progress) -> None:
        self._shown_at = time.monotonic()
        self._loss = self._loss if progress.loss is None else progress.loss
        applied, left = progress.samples_applied, progress.seconds_left
        rank, speed = progress.slowest or (0, 1.0)
        told = [
            f"{applied:,}" + (" samples" if self._total is None else f"/{self._total:,}"),
            f"{progress.rate:,.0f}/s",
            f"efficiency {progress.efficiency:.3f}" if progress.efficiency is not None else "",
            f"loss {self._loss:.4f}" if self._loss is not None else "",
            f"staleness {progress.staleness:.1f}",
            f"rank {rank} slowest, at {speed:.0%} of its profile" if speed < NOTABLY_SLOW else "",
            f"{_duration(left)} left" if left is not None else "",
        ]
        text = "  ".join(filter(None, told))
        if self._console.is_terminal:
            self._show_bar(applied, text)
        else:
            self._console.print(text)

    def _show_bar(self, applied: int, text: str) -> None:
        if self._bar is None:
            columns = (bars.BarColumn(bar_width=8), bars.TextColumn("{task.description}"))
            self._bar = bars.Progress(*columns, console=self._console)
            self._bar.start()
            self._task = self._bar.add_task(text, total=self._total, completed=self._already)
        assert self._task is not None
        self._bar.update(self._task, completed=applied, description=text)

    def evaluated(self, sentence: str, applied: int, metrics: Mapping[str, float]) -> None:
        if self._total is None or applied < self._total:  # the closing lines have the last one
            self._console.print(sentence)

    def say(self, text: str) -> None:
        self._console.print(text)

    def failed(self, error: str) -> None:
        """The sentence itself goes to standard error."""

    def close(self, summary: Mapping[str, Any] | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        if summary is not None:
            self._summarise(summary)

    def _summarise(self, summary: Mapping[str, Any]) -> None:
        rates = [rank["solo_samples_per_second"] for rank in summary["per_rank"]]
        metrics = "  ".join(f"{name} {value:.4f}" for name, value in summary["metrics"].items())
        waiter = max(summary["per_rank"], key=lambda rank: rank.get("wait_fraction", 0.0))
        place = ", ".join(filter(None, (waiter["host"], waiter["device"])))
        staleness, control = summary["staleness"], summary.get("control")
        bound = _range(control["delay_bound"]) if control else summary["delay_bound"]
        lines = [
            f"{summary['status']}: {_of_expected(summary)} samples"
            f" in {summary['train_seconds']:.1f} s on {summary['ranks']} ranks  {metrics}",
            efficiency.sentence(summary),
            *(
                []
                if None in rates
                else [f"equal shares in lock-step could reach {equal_share_ceiling(rates):.3f} at most"]
            ),
            f"{summary['rounds']} rounds{_bytes(summary)}, staleness {staleness['mean']:.2f} on average,"
            f" {staleness['max']} at most (bound {bound}); rank {waiter['rank']} ({place}) waited longest,"
            f" {waiter['wait_fraction']:.1%} of the time",
        ]
        if summary["rounds_changes"]:
            last = summary["rounds_changes"][-1]
            lines.append(f"from round {last['round']} on: {last['reason']}")
        if control:
            lines.append(
                f"controller {control['name']}: {control['decisions']} decisions, {control['changes']} changes;"
                f" accumulation {_range(control['accumulation'])}, at the end {summary['accumulation']};"
                f" delay bound {bound}, at the end {summary['delay_bound']}"
            )
        overrun = summary["overrun_fraction"]
        if overrun > 0.01:
            lines.append(
                f"careful: {overrun:.1%} of the emulated slices took longer than they should, so this machine was"
                " measured, not the program; lower --emulation.samples_per_second"
            )
        self._console.print("\n".join(lines))


def _bytes(summary: Mapping[str, Any]) -> str:
    sent = summary.get("bytes_of_ddp")
    return f" of {sent:.2g} times the bytes of DistributedDataParallel" if sent else ""


def _of_expected(summary: Mapping[str, Any]) -> str:
    """Samples that were trained on, and of how many, if that is known."""
    applied, expected = summary.get("samples_applied", 0), summary.get("samples_expected")
    return f"{applied:,}" if expected is None else f"{applied:,} of {expected:,}"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole / 3600:.1f} h"


def _range(ends: Sequence[int]) -> str:
    least, greatest = ends
    return str(least) if least == greatest else f"{least} to {greatest}"
