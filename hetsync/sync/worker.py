"""A rank's half of the protocol: when it may begin its next piece. Pure, like the policy; the engine and the
simulator share it.
"""

from __future__ import annotations

from collections import deque

from hetsync.sync.messages import Began, Finished, Piece, Took


class Worker:
    """What one rank holds. `version` is the anchor version that its local weights have seen."""

    def __init__(self, rank: int, version: int = 0) -> None:
        self.rank = rank
        self.version = version
        self._pieces: deque[Piece] = deque()
        self._finished: list[tuple[int, int]] = []  # (piece, version it began from), in no round yet
        self._flying: list[tuple[int, int]] = []  # (round, piece) of rounds that are not complete
        self._current: Piece | None = None
        self._began_from = version

    @property
    def upcoming(self) -> Piece | None:
        """The piece that comes next (to load its samples ahead)."""
        return self._pieces[0] if self._pieces else None

    @property
    def computing(self) -> bool:
        return self._current is not None

    @property
    def unapplied(self) -> int:
        """Finished pieces whose rounds are not complete."""
        return len(self._finished) + len(self._flying)

    def give(self, piece: Piece) -> None:
        self._pieces.append(piece)

    def may_begin(self) -> bool:
        """A rank runs at most D contributions ahead, and never from a version that the policy has excluded."""
        if self._current is not None or not self._pieces:
            return False
        piece = self._pieces[0]
        if piece.synchronous_round is not None:
            return self.version == piece.synchronous_round
        return self.version >= piece.not_before and self.unapplied <= piece.delay_bound

    def begin(self) -> tuple[Piece, Began]:
        self._current, self._began_from = self._pieces.popleft(), self.version
        return self._current, Began(self.rank, self._current.number, self.version)

    def finish(self, seconds: float, loss_sum: float) -> Finished:
        assert self._current is not None
        piece, self._current = self._current, None
        if piece.synchronous_round is None:
            self._finished.append((piece.number, self._began_from))
        return Finished(self.rank, piece.number, piece.samples, seconds, loss_sum)

    def take(self, round_number: int) -> tuple[Took, int]:
        """All that is finished goes into a round; with the staleness of the oldest of it."""
        taken, self._finished = self._finished, []
        self._flying += [(round_number, piece) for piece, _ in taken]
        return Took(self.rank, round_number, taken[-1][0]), round_number - min(version for _, version in taken)

    def complete(self, round_number: int) -> None:
        self._flying = [(number, piece) for number, piece in self._flying if number != round_number]
