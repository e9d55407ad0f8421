"""How long a communication thread sleeps between two looks: a fraction of the time for which nothing has happened.

Where the main thread waits, looking adds at most that fraction to the wait; where it computes, seldom is often enough.
The simulator sleeps by the same rule.
"""

from __future__ import annotations

FRACTION_WAITING = 0.1
FRACTION_COMPUTING = 0.5
SHORTEST_SECONDS = 50e-6
LONGEST_COLLECTIVE_SECONDS = 6e-3
LONGEST_IDLE_SECONDS = 16e-3


def nap_seconds(quiet_seconds: float, fraction: float, longest: float) -> float:
    """The next nap, after so many seconds without news."""
    return min(longest, max(SHORTEST_SECONDS, fraction * quiet_seconds))
