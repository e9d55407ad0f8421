"""How many messages a second rank 0 can answer: the real coordinator and state machine, messages as on the MPI plane.

    python -m benchmarks.coordinator_load 512 4096 [--output FOLDER]                      one process
    launch/local 4 -- python -m benchmarks.coordinator_load 512 4096 [--output FOLDER]    over MPI

Ranks whose computing takes no time tell and ask as fast as they may. In one process only what rank 0 does is counted:
decoding, deciding, encoding; a sixteenth of the ranks, in no order, finish between two polls of a leader, as they do
when a slice takes 0.2 s and a poll comes every 12 ms. Over MPI the other processes play all ranks and leaders, and what
sending and receiving costs rank 0 is counted too. Seconds are those of rank 0's own CPU time while it has something to
do, so that processes which share its core do not count.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetsync.balance.profile import StepTime
from hetsync.balance.speed_tracker import Speeds
from hetsync.data.ledger import Ledger
from hetsync.plane.base import Plane
from hetsync.plane.mpi import MpiPlane
from hetsync.sync.coordinator import Coordinator, as_messages
from hetsync.sync.messages import (
    AssignTask,
    Event,
    EventBatch,
    GroupBatch,
    Instruction,
    InstructionBatch,
    RoundCompleted,
    Settings,
    StartRound,
)
from hetsync.sync.milestones import no_marks, rests_at
from hetsync.sync.router import GROUP, Router
from hetsync.sync.state_machine import RoundStateMachine
from hetsync.sync.worker import Worker

SHARE = 16  # samples of each rank in a slice; what it is changes nothing here
NO_END = 10**15


@dataclass(frozen=True)
class Load:
    """`seconds` of rank 0's CPU time for so many rounds, events of ranks, and messages that it reads and writes."""

    ranks: int
    over_mpi: bool
    rounds: int
    events: int
    messages_in: int
    messages_out: int
    seconds: float

    @property
    def events_per_second(self) -> float:
        return self.events / self.seconds

    @property
    def rounds_per_second(self) -> float:
        """The most that rank 0 can do."""
        return self.rounds / self.seconds


Said = list[tuple[int, list[Event]]]  # by rank


class Crowd:
    """Some of the ranks, whose computing takes no time: those that have waited longest are the first to finish."""

    def __init__(self, ranks: Sequence[int]) -> None:
        mixed = random.Random(len(ranks)).sample(ranks, len(ranks))
        self._workers = {rank: Worker(rank) for rank in mixed}
        self._computing: deque[int] = deque()
        self._idle = set(ranks)
        self._next_round = 0

    def take_in(self, messages: Mapping[int, Sequence[Instruction]]) -> list[StartRound]:
        """What rank 0 has to say, by rank; the rounds that it starts, where nobody here has heard of them."""
        started = []
        for rank, instructions in messages.items():
            for instruction in instructions:
                if isinstance(instruction, AssignTask):
                    self._workers[rank].assign(instruction.task)
                elif instruction.number == self._next_round:
                    self._next_round += 1
                    started.append(instruction)
        return started

    def begun(self) -> Said:
        """By ranks that had to wait and may go on now."""
        able = [rank for rank in sorted(self._idle) if self._workers[rank].may_start()]
        return [(rank, [self._begin(rank)]) for rank in able]

    def finished(self, count: int) -> Said:
        """By up to so many ranks that have computed."""
        return [self._finish(self._computing.popleft()) for _ in range(min(count, len(self._computing)))]

    def _finish(self, rank: int) -> tuple[int, list[Event]]:
        worker = self._workers[rank]
        events: list[Event] = [worker.finish_task(1.0, 1.0)]
        if worker.may_start():
            events.append(self._begin(rank))
        else:
            self._idle.add(rank)
        return rank, events

    def _begin(self, rank: int) -> Event:
        self._idle.discard(rank)
        self._computing.append(rank)
        return self._workers[rank].start_task()[1]

    def join(self, start: StartRound) -> Said:
        """By those who contribute."""
        own = sorted(start.contributors & self._workers.keys())
        return [(rank, [self._workers[rank].contribute(start.number)[0]]) for rank in own]

    def land(self, number: int) -> None:
        for worker in self._workers.values():
            worker.complete_round(number)
            worker.version = number + 1


def by_writer(said: Said) -> dict[int, list[Event]]:
    """Messages to rank 0: each of the ranks that it leads writes itself, the others' leaders for them."""
    messages: dict[int, list[Event]] = defaultdict(list)
    for rank, events in said:
        messages[rank if rank < GROUP else rank // GROUP * GROUP] += events
    return messages


def addressed(to: int, message: InstructionBatch | GroupBatch) -> Mapping[int, Sequence[Instruction]]:
    """By rank, whether a leader is to pass it on or not."""
    return message.by_rank if isinstance(message, GroupBatch) else {to: message.instructions}


def make_coordinator(ranks: int, router: Router) -> Coordinator:
    shares = dict.fromkeys(range(ranks), SHARE)
    machine = RoundStateMachine(shares, Settings(), Ledger(NO_END), rests_at(no_marks, "", NO_END))
    speeds = Speeds(dict.fromkeys(shares, StepTime(0.0, 1 / SHARE)))
    return Coordinator(machine, speeds, as_messages(machine, router.send_instructions), rebalance=True)


class Flooded(ABC):
    """Rank 0, with what it has done so far. Sums take no time: a round is over when its contributors have spoken.

    To its router it is the plane that the messages go out on. Rank 0's own main thread is one of the crowd.
    """

    rank = 0
    over_mpi = False

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.events = self.messages_in = self.messages_out = 0
        self.seconds = 0.0
        self._router = Router(self)  # type: ignore[arg-type]
        self.coordinator = make_coordinator(ranks, self._router)

    @abstractmethod
    def send(self, message: Any, to: int) -> None:
        """Encode, and carry where messages are carried."""

    @abstractmethod
    def until(self, version: int) -> None:
        """Play until so many rounds are over."""

    def handle_events(self, events: Sequence[Event]) -> None:
        self.events += len(events)
        self.coordinator.handle(events)

    def measure(self, warm_up: int) -> Load:
        self.until(warm_up)
        before = self._books()
        self.until(warm_up + rounds_for(self.ranks))
        spent = [after - earlier for after, earlier in zip(self._books(), before, strict=True)]
        rounds, events, messages_in, messages_out = map(int, spent[:-1])
        return Load(self.ranks, self.over_mpi, rounds, events, messages_in, messages_out, spent[-1])

    def _books(self) -> tuple[float, ...]:
        return self.coordinator.machine.version, self.events, self.messages_in, self.messages_out, self.seconds


class FloodedAlone(Flooded):
    """All ranks are in this process; messages are encoded, but nobody carries them."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._crowd = Crowd(range(ranks))
        self._outbox: list[tuple[int, bytes]] = []
        self._started: deque[StartRound] = deque()
        self.coordinator.start()
        self._deliver()

    def send(self, message: Any, to: int) -> None:
        self.messages_out += 1
        self._outbox.append((to, pickle.dumps(message)))

    def until(self, version: int) -> None:
        machine, crowd = self.coordinator.machine, self._crowd
        while machine.version < version:
            self._tell(crowd.begun())
            self._tell(crowd.finished(max(1, self.ranks // 16)))
            if self._started:
                start = self._started.popleft()
                self._tell(crowd.join(start))
                self._tell([(0, [RoundCompleted(start.number)])])
                crowd.land(start.number)

    def _tell(self, said: Said) -> None:
        messages = by_writer(said)
        own = messages.pop(0, [])
        encoded = [pickle.dumps(EventBatch(events)) for events in messages.values()]
        began = time.thread_time()
        for data in encoded:
            self.handle_events(pickle.loads(data).events)
        if own:
            self.handle_events(own)
        self.seconds += time.thread_time() - began
        self.messages_in += len(encoded)
        self._deliver()

    def _deliver(self) -> None:
        outbox, self._outbox = self._outbox, []
        for instructions in self._router.pop_own():
            self._started += self._crowd.take_in({0: instructions})
        for to, data in outbox:
            self._started += self._crowd.take_in(addressed(to, pickle.loads(data)))


class FloodedOverMpi(Flooded):
    """All ranks but rank 0's communication thread are played by the other processes."""

    over_mpi = True

    def __init__(self, ranks: int, plane: Plane) -> None:
        super().__init__(ranks)
        self._plane = plane
        self._started: deque[int] = deque()
        self.coordinator.start()
        self._pass_own()

    def send(self, message: Any, to: int) -> None:
        self.messages_out += 1
        self._plane.send((to, message), player_of(to, self._plane))

    def _pass_own(self) -> None:
        """What rank 0's communication thread has for its main thread goes to whom plays that."""
        for instructions in self._router.pop_own():
            self._started += [i.number for i in instructions if isinstance(i, StartRound)]
            self._plane.send((0, InstructionBatch(instructions)), player_of(0, self._plane))

    def until(self, version: int) -> None:
        machine = self.coordinator.machine
        while machine.version < version:
            before, began = machine.version, time.thread_time()
            messages = self._plane.receive()
            if not messages and not self._started:
                time.sleep(1e-4)
                continue  # nothing to do is not counted
            for _, batch in messages:
                self.messages_in += 1
                self.handle_events(batch.events)
            while self._started:
                self.handle_events([RoundCompleted(self._started.popleft())])
            self._pass_own()
            for landed in range(before, machine.version):
                self._tell_all(landed)
            self.seconds += time.thread_time() - began

    def end(self) -> None:
        """Let the others come to an end, and hear them out."""
        self._tell_all(None)
        playing = self._plane.size - 1
        while playing:
            playing -= sum(message is None for _, message in self._plane.receive())

    def _tell_all(self, landed: int | None) -> None:
        for process in range(1, self._plane.size):
            self._plane.send(landed, process)


def player_of(rank: int, plane: Plane) -> int:
    """The process that plays a rank; a leader's whole group is in one."""
    return 1 + (rank if rank < GROUP else rank // GROUP) % (plane.size - 1)


def play(plane: Plane, ranks: int) -> None:
    """The ranks of this process, until rank 0 has had enough."""
    crowd = Crowd([rank for rank in range(ranks) if player_of(rank, plane) == plane.rank])
    said: Said = []
    while True:
        for _, message in plane.receive():
            if message is None:
                plane.send(None, 0)
                return
            if isinstance(message, int):
                crowd.land(message)
            else:
                said += [joined for start in crowd.take_in(addressed(*message)) for joined in crowd.join(start)]
        said += crowd.begun() + crowd.finished(8)
        if said and not plane.unread(0):
            for events in by_writer(said).values():
                plane.send(EventBatch(events), 0)
            said = []
        else:
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
            print(f"{ranks} ranks: {load.events_per_second:,.0f} events/s, {load.rounds_per_second:,.1f} rounds/s")
    for kind, found in loads.items():
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / f"coordinator-{kind}.json").write_text(json.dumps(found, indent=1))
    plane.close()


if __name__ == "__main__":
    main()
