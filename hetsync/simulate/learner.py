"""What the ranks learn while the clock runs: nothing, a noisy quadratic, or the recipe's model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetsync.sync.messages import Piece


class Learner:
    """Called by the simulation in the order in which a rank's two threads act. This one learns nothing.

    Delayed: `begin`, per slice `slice` and `apply`, then `finish`; `load` when the rank's finished pieces go into a
    round, `add` when all ranks have joined it, `land` when its sum has arrived on a rank; `settle` at a drain.
    Synchronous: `begin`, `slice`s, `finish`; `reduce` when all ranks have finished, then `step` on each of them.
    """

    learns = False  # are there losses?

    def begin(self, rank: int, piece: Piece) -> None:
        """The rank's next slices belong to this piece."""

    def slice(self, rank: int, piece: Piece, index: int) -> float:
        """Gradient of a slice at the rank's local weights (delayed: and the inner step); returns its mean loss."""
        return 0.0

    def apply(self, rank: int) -> None:
        """The local weights take over what has landed."""

    def finish(self, rank: int, piece: Piece) -> None:
        """The piece is computed: its progress, or its gradient, is for the others."""

    def load(self, rank: int, drain: bool) -> None:
        """What is finished goes into the round that starts."""

    def add(self, number: int, contributors: Sequence[int], drain: bool) -> None:
        """The round's sum. The one before has landed everywhere by now, whether `land` has said so or not."""

    def land(self, rank: int, number: int) -> None:
        """The sums up to this round's have arrived on the rank."""

    def settle(self) -> None:
        """At a delayed drain all ranks take over the anchor."""

    def reduce(self, number: int, round_samples: int) -> None:
        """Gradients become the mean over the round's samples."""

    def step(self, rank: int, piece: Piece) -> None:
        """The optimizer's synchronous step."""

    def rest(self, samples: Mapping[int, int], applied: int, synchronous: bool) -> None:
        """All ranks are at rest; `samples` is what each has used since the last time, `applied` what all have."""

    def leave(self, rank: int) -> None:
        """At rest: the rank is gone."""

    def join(self, rank: int) -> None:
        """At rest: a rank comes with the anchor's weights."""

    def evaluate(self) -> dict[str, float]:
        """Metrics of the anchor."""
        return {}

    def learning_rate(self, applied: int) -> float:
        """What the schedule multiplies it by after so many samples."""
        return 1.0

    @property
    def noise_scale(self) -> float | None:
        """Gradient noise scale in samples at the anchor, where it is known (McCandlish et al. 2018)."""
        return None

    @property
    def anchor_sha256(self) -> str | None:
        """Digest of the weights that all ranks share, at rest, where there are any."""
        return None
