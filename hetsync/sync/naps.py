"""How long a communication thread sleeps between two looks: a fraction of the time for which nothing has happened.

Where the main thread waits, looking adds at most that fraction to the wait; where it computes, seldom is often enough.
A look finds its code and data no longer in the processor's cache, and costs a tenth of a millisecond and more of the
core that computes. So a rank that computes in delayed mode, where hardly anybody waits for it, never looks more often
than `SHORTEST_DELAYED_SECONDS`, but at the begin of each piece. The simulator sleeps by the same rule but for this one:
of rounds it draws the longest nap anyway.
"""

from __future__ import annotations

FRACTION_WAITING = 0.1
FRACTION_COMPUTING = 0.5
SHORTEST_SECONDS = 50e-6
SHORTEST_DELAYED_SECONDS = 4e-3
LONGEST_COLLECTIVE_SECONDS = 6e-3
LONGEST_IDLE_SECONDS = 16e-3


def nap_seconds(quiet_seconds: float, fraction: float, longest: float, shortest: float = SHORTEST_SECONDS) -> float:
    """The next nap, after so many seconds without news."""
    return min(longest, max(shortest, fraction * quiet_seconds))
