"""A slice of a replica simulated event by event, written without a look at hetsync.plan: what the evaluator must equal.

Every rank has an inbox, every pair of ranks a queue in front of their link, and a heap has what happens next.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import count


def one_forward_one_backward(in_flight: int, micro_batches: int):
    """As it goes: backward as soon as `in_flight` passes wait for it, or no forward pass is left."""
    forward = backward = 0
    while backward < micro_batches:
        if forward < micro_batches and forward - backward < in_flight:
            yield "F", forward
            forward += 1
        else:
            yield "B", backward
            backward += 1


def samples_of(part, size):
    """Which samples of a micro-batch each of a stage's ranks computes."""
    bounds, done = [], 0
    for n in part(size):
        bounds.append(set(range(done, done + n)))
        done += n
    return bounds


def simulate(stages, edges, sizes, in_flight, links, late=()):
    """When the last rank of each stage has ended.

    `stages`: for each a list of ranks as {"F": (fixed, each), "B": (fixed, each)}, and a function from a micro-batch's
    size to the ranks' samples. `edges`: bytes a sample between two stages. `links(a, b)`: latency and seconds a byte
    between two (stage, place). `late`: edges whose target needs what comes only once it goes backward.
    """
    ranks = [(s, i) for s, (members, _) in enumerate(stages) for i in range(len(members))]
    owned = {(s, m): samples_of(stages[s][1], n) for s in range(len(stages)) for m, n in enumerate(sizes)}
    to_do = {rank: deque(one_forward_one_backward(in_flight[rank[0]], len(sizes))) for rank in ranks}
    inbox, busy, queues, carrying = {rank: set() for rank in ranks}, set(), {}, set()
    events, order = [], count()
    ended = [0.0] * len(stages)

    def pieces(rank, m):
        """How many passes a rank has of a micro-batch: samples go together that all stages leave together."""
        return len(
            {
                tuple(next(j for j, own in enumerate(owned[s, m]) if sample in own) for s in range(len(stages)))
                for sample in owned[rank[0], m][rank[1]]
            }
        )

    def partners(rank, m, kind):
        """(Rank that sends for this work, bytes)."""
        stage, place = rank
        for (a, b), per_sample in edges.items():
            other = a if (kind == "F" and b == stage) else b if (kind == "B" and a == stage) else None
            if other is not None:
                for j, theirs in enumerate(owned[other, m]):
                    if shared := len(theirs & owned[stage, m][place]):
                        yield (other, j), shared * per_sample

    def needed(rank, m, kind):
        for other, _ in partners(rank, m, kind):
            if kind == "B" or (other[0], rank[0]) not in late:
                yield kind, m, other
        for other, _ in partners(rank, m, "F") if kind == "B" else ():
            if (other[0], rank[0]) in late:
                yield "F", m, other

    def try_to_begin(rank, now):
        if rank in busy or not to_do[rank]:
            return
        kind, m = to_do[rank][0]
        if all(each in inbox[rank] for each in needed(rank, m, kind)):
            busy.add(rank)
            fixed, each = stages[rank[0]][0][rank[1]][kind]
            seconds = pieces(rank, m) * fixed + each * len(owned[rank[0], m][rank[1]])
            heapq.heappush(events, (now + seconds, next(order), "done", rank))

    def try_to_send(pair, now):
        if pair not in carrying and queues.get(pair):
            carrying.add(pair)
            size, what = queues[pair].popleft()
            heapq.heappush(events, (now + size * links(*pair)[1], next(order), "sent", (pair, what)))

    for rank in ranks:
        try_to_begin(rank, 0.0)
    while events:
        now, _, event, about = heapq.heappop(events)
        if event == "done":
            kind, m = to_do[about].popleft()
            busy.discard(about)
            ended[about[0]] = now
            for target, size in partners(about, m, "B" if kind == "F" else "F"):
                queues.setdefault((about, target), deque()).append((size, (kind, m, about)))
                try_to_send((about, target), now)
            try_to_begin(about, now)
        elif event == "sent":
            pair, what = about
            carrying.discard(pair)
            heapq.heappush(events, (now + links(*pair)[0], next(order), "here", (pair[1], what)))
            try_to_send(pair, now)
        else:
            rank, what = about
            inbox[rank].add(what)
            try_to_begin(rank, now)
    assert not any(to_do.values()), "they wait for each other"
    return ended
