"""When a communication thread polls.

It sleeps between two polls: for a fraction of the time for which nothing has happened. Where the main thread waits,
polling adds at most that fraction to the wait: while a sum moves, the shortest sleep would add more, and the thread
yields the processor instead. Where the main thread computes, seldom is often enough. A poll finds its code and
data no longer in the processor's cache, and costs a tenth of a millisecond and more of the core that computes. So a
rank that computes and that hardly anybody waits for never polls more often than `SHORTEST_CALM_POLL_SECONDS`, but at
the start of each task and where gradients are released: in delayed mode, and in synchronous mode while none of its
gradients are under way. A GPU's rank polls at `SHORTEST_QUEUED_POLL_SECONDS` while sums are under way, which go through
the host's memory by few segments a poll: its cores are free for that, but its two threads share an interpreter. In
delayed mode, on the cores that the model is computed by, it does not poll more often than a
round needs to land while ranks have other work. The simulator follows the same rule but for this: of rounds it draws
the longest sleep anyway.
"""

from __future__ import annotations

from hetsync.sync.shared_state import MainThread, Phase, SharedState

POLL_FRACTION_WAITING = 0.1  # of the quiet, where the main thread waits
POLL_FRACTION_COMPUTING = 0.5
SHORTEST_POLL_SECONDS = 50e-6
SHORTEST_CALM_POLL_SECONDS = 4e-3
SHORTEST_QUEUED_POLL_SECONDS = 0.5e-3
POLLS_OF_PATIENCE = 32  # while a rank computes on without a round, which takes ten of up to four ranks
LONGEST_COLLECTIVE_POLL_SECONDS = 6e-3  # while a collective is under way
LONGEST_IDLE_POLL_SECONDS = 16e-3


def poll_seconds(
    quiet_seconds: float, fraction: float, longest: float, shortest: float = SHORTEST_POLL_SECONDS
) -> float:
    """Until the next poll, after so many seconds without news."""
    return min(longest, max(shortest, fraction * quiet_seconds))


def pause_seconds(shared: SharedState, summing: bool, quiet_seconds: float) -> float:
    """The same on a rank that does what `shared` says, and has sums under way or not; 0 says to yield."""
    waiting = shared.main_thread is MainThread.WAITING
    longest = LONGEST_COLLECTIVE_POLL_SECONDS if summing else LONGEST_IDLE_POLL_SECONDS
    fraction = POLL_FRACTION_WAITING if waiting else POLL_FRACTION_COMPUTING
    calm = not waiting and shared.phase is not Phase.RESTING and (shared.deltas is not None or not summing)
    shortest = SHORTEST_POLL_SECONDS
    if calm and summing and shared.queues:
        shortest = SHORTEST_QUEUED_POLL_SECONDS
    elif calm:
        shortest = max(SHORTEST_CALM_POLL_SECONDS, shared.patience_seconds / POLLS_OF_PATIENCE)
        longest = max(longest, min(shortest, LONGEST_IDLE_POLL_SECONDS))
    if waiting and summing and fraction * quiet_seconds < shortest:
        return 0.0
    return poll_seconds(quiet_seconds, fraction, longest, shortest)
