"""Progress for machines: a JSON object a line on standard output; docs/guide/seeing.md tells of each `event`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from hetsync.balance.profile import RankProfile
from hetsync.files import json_text
from hetsync.train.terminal import LINE_SECONDS, Forgiving, Progress


class JsonLines:
    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = Forgiving(stream or sys.stdout)
        self._shown_at = time.monotonic()

    def _tell(self, event: str, **fields: Any) -> None:
        self._stream.write(json_text({"event": event, **fields}) + "\n")
        self._stream.flush()

    def ranks(self, profiles: Sequence[RankProfile], shares: Sequence[int], rates: Sequence[float] | None) -> None:
        told: Sequence[float | None] = rates or [None] * len(profiles)
        rows = [
            {"rank": rank, "host": p.host, "device": p.device, "share": share, "solo_samples_per_second": rate}
            for rank, (p, share, rate) in enumerate(zip(profiles, shares, told, strict=True))
        ]
        self._tell("ranks", ranks=rows)

    def due(self) -> bool:
        return time.monotonic() > self._shown_at + LINE_SECONDS

    def progress(self, progress: Progress) -> None:
        self._shown_at = time.monotonic()
        figures = {
            name: value for name, value in asdict(progress).items() if name not in ("slowest", "already", "capable")
        }
        rank, speed = progress.slowest or (None, None)
        self._tell(
            "progress",
            **figures,
            samples_per_second=progress.rate,
            efficiency=progress.efficiency,
            seconds_left=progress.seconds_left,
            slowest_rank=rank,
            slowest_rank_speed=speed,
        )

    def evaluated(self, sentence: str, applied: int, metrics: Mapping[str, float]) -> None:
        self._tell("evaluation", samples_applied=applied, metrics=dict(metrics))

    def say(self, text: str) -> None:
        self._tell("message", text=text)

    def failed(self, error: str) -> None:
        self._tell("failure", error=error)

    def close(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            self._tell("end", summary=dict(summary))
