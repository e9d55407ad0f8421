"""How many letters a second rank 0 can answer: the real coordinator and policy, with letters as on the MPI plane.

    python benchmarks/coordinator_load.py 512 4096 [--output FOLDER]                      one process
    launch/local 4 -- python benchmarks/coordinator_load.py 512 4096 [--output FOLDER]    over MPI

Ranks whose computing takes no time tell and ask as fast as they may. In one process only what rank 0 does is counted:
decoding, deciding, encoding. Over MPI the other processes play all ranks, and what sending and receiving costs rank 0
is counted too. Seconds are those of rank 0's own CPU time while it has something to do, so that processes which share
its core do not count.
"""

from __future__ import annotations

import argparse
import json
import pickle
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetsync.data.ledger import Ledger
from hetsync.plane.base import Plane
from hetsync.plane.mpi import MpiPlane
from hetsync.slicing import StepTime
from hetsync.sync.coordinator import Coordinator, Speeds
from hetsync.sync.messages import Completed, Event, Give, Instruction, Settings, StartRound
from hetsync.sync.milestones import Milestone
from hetsync.sync.policy import Policy
from hetsync.sync.worker import Worker

SHARE = 16  # samples of each rank in a slice; what it is changes nothing here
NO_END = 10**15


@dataclass(frozen=True)
class Load:
    """`seconds` of rank 0's CPU time for so many rounds and letters (one letter holds all that is said at once)."""

    ranks: int
    over_mpi: bool
    rounds: int
    letters_in: int
    letters_out: int
    seconds: float

    @property
    def letters_per_second(self) -> float:
        return (self.letters_in + self.letters_out) / self.seconds

    @property
    def rounds_per_second(self) -> float:
        """The most that rank 0 can do."""
        return self.rounds / self.seconds


class Crowd:
    """Some of the ranks, whose computing takes no time: those that have waited longest are the first to finish."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._workers = {rank: Worker(rank) for rank in ranks}
        self._computing: deque[int] = deque()
        self._idle = set(ranks)
        self._next_round = 0

    def take_in(self, rank: int, instructions: Sequence[Instruction]) -> list[StartRound]:
        """What rank 0 has to say to a rank; the round that it starts, where nobody here has heard of it."""
        started = []
        for instruction in instructions:
            if isinstance(instruction, Give):
                self._workers[rank].give(instruction.piece)
            elif instruction.number == self._next_round:
                self._next_round += 1
                started.append(instruction)
        return started

    def begun(self) -> list[tuple[int, list[Event]]]:
        """Letters of ranks that had to wait and may go on now."""
        able = [rank for rank in sorted(self._idle) if self._workers[rank].may_begin()]
        return [(rank, [self._begin(rank)]) for rank in able]

    def finished(self, count: int) -> list[tuple[int, list[Event]]]:
        """Letters of up to so many ranks that have computed."""
        return [self._finish(self._computing.popleft()) for _ in range(min(count, len(self._computing)))]

    def _finish(self, rank: int) -> tuple[int, list[Event]]:
        worker = self._workers[rank]
        events: list[Event] = [worker.finish(1.0, 1.0)]
        if worker.may_begin():
            events.append(self._begin(rank))
        else:
            self._idle.add(rank)
        return rank, events

    def _begin(self, rank: int) -> Event:
        self._idle.discard(rank)
        self._computing.append(rank)
        return self._workers[rank].begin()[1]

    def join(self, start: StartRound) -> list[tuple[int, list[Event]]]:
        """Letters of those who contribute."""
        own = sorted(start.contributors & self._workers.keys())
        return [(rank, [self._workers[rank].take(start.number)[0]]) for rank in own]

    def land(self, number: int) -> None:
        for worker in self._workers.values():
            worker.complete(number)
            worker.version = number + 1


def make_coordinator(ranks: int, send: Any) -> Coordinator:
    shares = dict.fromkeys(range(ranks), SHARE)
    policy = Policy(shares, Settings(), Ledger(NO_END), lambda position: Milestone(NO_END, "end", True))
    return Coordinator(policy, Speeds(dict.fromkeys(shares, StepTime(0.0, 1 / SHARE))), send, rebalance=True)


class Flooded(ABC):
    """Rank 0, with what it has done so far. Sums take no time: a round is over when its contributors have spoken."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.letters_in = self.letters_out = 0
        self.seconds = 0.0
        self.started: StartRound | None = None
        self.coordinator = make_coordinator(ranks, self.send)

    @abstractmethod
    def send(self, rank: int, instructions: Sequence[Instruction]) -> None:
        """Encode, and carry where letters are carried."""

    @abstractmethod
    def until(self, version: int) -> None:
        """Play until so many rounds are over."""

    def note(self, instructions: Sequence[Instruction]) -> None:
        self.letters_out += 1
        for instruction in instructions:
            if isinstance(instruction, StartRound):
                self.started = instruction

    def measure(self, warm_up: int) -> Load:
        self.until(warm_up)
        before = (self.coordinator.policy.version, self.letters_in, self.letters_out, self.seconds)
        self.until(warm_up + rounds_for(self.ranks))
        after = (self.coordinator.policy.version, self.letters_in, self.letters_out, self.seconds)
        rounds, letters_in, letters_out, seconds = (b - a for a, b in zip(before, after, strict=True))
        return Load(self.ranks, self.over_mpi, int(rounds), int(letters_in), int(letters_out), seconds)

    over_mpi = False


class FloodedAlone(Flooded):
    """All ranks are in this process; letters are encoded, but nobody carries them."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._crowd = Crowd(range(ranks))
        self._outbox: list[tuple[int, bytes]] = []
        self.coordinator.begin()
        self._deliver()

    def send(self, rank: int, instructions: Sequence[Instruction]) -> None:
        self._outbox.append((rank, pickle.dumps(instructions)))

    def until(self, version: int) -> None:
        policy, crowd = self.coordinator.policy, self._crowd
        while policy.version < version:
            self._tell(crowd.begun())
            self._tell(crowd.finished(max(1, self.ranks // 64)))
            if self.started is not None:
                start, self.started = self.started, None
                self._tell(crowd.join(start))
                self._tell([(0, [Completed(start.number)])])
                crowd.land(start.number)

    def _tell(self, letters: Sequence[tuple[int, list[Event]]]) -> None:
        encoded = [pickle.dumps(events) for _, events in letters]
        began = time.thread_time()
        for data in encoded:
            self.coordinator.on(pickle.loads(data))
        self.seconds += time.thread_time() - began
        self.letters_in += len(letters)
        self._deliver()

    def _deliver(self) -> None:
        for rank, data in self._outbox:
            instructions = pickle.loads(data)
            self.note(instructions)
            self._crowd.take_in(rank, instructions)
        self._outbox.clear()


class FloodedOverMpi(Flooded):
    """Rank r of the job is played by process 1 + r mod (processes - 1)."""

    over_mpi = True

    def __init__(self, ranks: int, plane: Plane) -> None:
        super().__init__(ranks)
        self._plane = plane
        self.coordinator.begin()

    def send(self, rank: int, instructions: Sequence[Instruction]) -> None:
        self.note(instructions)
        self._plane.send((rank, instructions), 1 + rank % (self._plane.size - 1))

    def until(self, version: int) -> None:
        policy = self.coordinator.policy
        while policy.version < version:
            before, began = policy.version, time.thread_time()
            letters = self._plane.receive()
            if not letters and self.started is None:
                continue  # nothing to do is not counted
            for _, events in letters:
                self.letters_in += 1
                self.coordinator.on(events)
            if self.started is not None:
                start, self.started = self.started, None
                self.coordinator.on([Completed(start.number)])
            for landed in range(before, policy.version):
                self._tell_all(landed)
            self.seconds += time.thread_time() - began

    def end(self) -> None:
        """Let the others come to an end, and hear them out."""
        self._tell_all(None)
        playing = self._plane.size - 1
        while playing:
            playing -= sum(letter is None for _, letter in self._plane.receive())

    def _tell_all(self, landed: int | None) -> None:
        for process in range(1, self._plane.size):
            self._plane.send(landed, process)


def play(plane: Plane, ranks: int) -> None:
    """The ranks of this process, until rank 0 has had enough."""
    crowd = Crowd([rank for rank in range(ranks) if 1 + rank % (plane.size - 1) == plane.rank])
    while True:
        letters: list[tuple[int, list[Event]]] = []
        for _, letter in plane.receive():
            if letter is None:
                plane.send(None, 0)
                return
            if isinstance(letter, int):
                crowd.land(letter)
            else:
                letters += [joined for start in crowd.take_in(*letter) for joined in crowd.join(start)]
        letters += crowd.begun() + crowd.finished(8)
        for _, events in letters:
            plane.send(events, 0)
        if not letters:
            time.sleep(1e-4)


def measured(plane: Plane, ranks: int, warm_up: int) -> Load | None:
    """Collective; rank 0 gets the result."""
    if plane.size == 1:
        return FloodedAlone(ranks).measure(warm_up)
    load = None
    if plane.rank == 0:
        rank_0 = FloodedOverMpi(ranks, plane)
        load = rank_0.measure(warm_up)
        rank_0.end()
    else:
        play(plane, ranks)
    plane.barrier()
    return load


def rounds_for(ranks: int) -> int:
    """Enough to measure, few enough to wait for."""
    return max(10, min(400, 40_000 // ranks))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ranks", nargs="+", type=int, help="sizes of the job")
    parser.add_argument("--warm-up", type=int, default=12, help="rounds before the count begins")
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for coordinator-*.json")
    return parser.parse_args()


def main() -> None:
    options = parse()
    plane = MpiPlane()
    loads: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for ranks in options.ranks:
        load = measured(plane, ranks, options.warm_up)
        if load is not None:
            loads["mpi" if load.over_mpi else "local"].append(asdict(load))
            print(f"{ranks} ranks: {load.letters_per_second:,.0f} letters/s, {load.rounds_per_second:,.1f} rounds/s")
    for kind, found in loads.items():
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / f"coordinator-{kind}.json").write_text(json.dumps(found, indent=1))
    plane.close()


if __name__ == "__main__":
    main()
