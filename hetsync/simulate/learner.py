"""What the ranks learn while the clock runs: nothing, a noisy quadratic, or the recipe's model."""

from __future__ import annotations

from collections.abc import Mapping

from hetsync.sync.messages import StartRound, Task


class Learner:
    """Called by the simulation in the order in which a rank's two threads act. This one learns nothing.

    Delayed: `begin_task`, per slice `compute_slice` and `apply`, then `finish_task`; `pack` when the rank's finished
    tasks go into a round, `sum_deltas` when all ranks have joined it, `apply_sum` when its sum has arrived on a rank;
    `reset_to_anchor` at a drain. Synchronous: `begin_task`, `compute_slice`s, `finish_task`; `reduce_gradients` when
    all ranks have finished, then `step` on each of them.
    """

    learns = False  # are there losses?

    def begin_task(self, rank: int, task: Task) -> None:
        """The rank's next slices belong to this task."""

    def compute_slice(self, rank: int, task: Task, index: int) -> float:
        """Gradient of a slice at the rank's local weights (delayed: and the inner step); returns its mean loss."""
        return 0.0

    def apply(self, rank: int) -> None:
        """The local weights take over what has landed."""

    def finish_task(self, rank: int, task: Task) -> None:
        """The task is computed: its progress, or its gradient, is for the others."""

    def pack(self, rank: int, start: StartRound) -> None:
        """What is finished goes into this round, which starts."""

    def sum_deltas(self, start: StartRound) -> None:
        """The round's sum. The one before has landed everywhere by now, whether `apply_sum` has said so or not."""

    def apply_sum(self, rank: int, number: int) -> None:
        """The sums up to this round's have arrived on the rank."""

    def reset_to_anchor(self) -> None:
        """At a delayed drain all ranks take over the anchor."""

    def reduce_gradients(self, number: int, round_samples: int) -> None:
        """Gradients become the mean over the round's samples."""

    def step(self, rank: int) -> None:
        """The optimizer's synchronous step."""

    def at_rest(self, samples: Mapping[int, int], applied: int, synchronous: bool) -> None:
        """All ranks are at rest; `samples` is what each has used since the last time, `applied` what all have."""

    def keep(self) -> None:
        """At rest, before delayed training: what `go_back` goes back to."""

    def go_back(self, applied: int) -> None:
        """At a rest for that: all ranks are as they were at the last `keep`, after so many samples."""

    def remove_rank(self, rank: int) -> None:
        """At rest: the rank is gone."""

    def add_rank(self, rank: int) -> None:
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
