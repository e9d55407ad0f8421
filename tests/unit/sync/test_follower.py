"""Followers do what a log says: a replica in stages ends where one rank does that is driven by the same events."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import deepcopy

import pytest
import torch
from replicas import on_threads
from torch import nn

from hetsync.balance.profile import StepTime
from hetsync.config.schema import WireFormat
from hetsync.errors import UserError
from hetsync.plan.blocks import cut
from hetsync.plan.calls import observed_call
from hetsync.plan.division import WHOLE, Division
from hetsync.plane.base import Channels, Handle, Residual, StalledError, Sums
from hetsync.plane.local import LocalPlane
from hetsync.replica.base import MicroBatch, MicroBatches, Replica
from hetsync.replica.staged import StagedReplica, Stages
from hetsync.replica.whole import WholeReplica
from hetsync.sync.follower import Follower
from hetsync.sync.log import Applied, Began, Closed, Coming, Entry, Finished, Joined, Landed, LogBatch
from hetsync.sync.messages import StartRound, Task
from hetsync.sync.segmented import Segment, SegmentedDeltas
from hetsync.sync.shared_state import EngineOptions

LEADER, BATCH, ROUNDS = 99, 28, 7
SHARES = (16, 12)  # of the replica that is cut, and of the other
SPEEDS = (1, 1, 3, 5, 1)  # of ranks; of those that share a stage other parts of each micro-batch are


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.c(torch.relu(self.b(self.a(x))))
        return found


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch[:, :3]).square().mean()


def batch_of(task: Task, division: Division) -> list[MicroBatch]:
    drawn = torch.randn(task.samples, 4, generator=torch.Generator().manual_seed(task.number))
    return MicroBatches(drawn, torch.stack, 2, division)(range(task.samples))


class Meeting:
    """Where some ranks, on threads, sum what they post, in its order."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks, self.lock = ranks, threading.Lock()
        self.posted: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)

    def sums_of(self, rank: int) -> Sums:
        return MetSums(self, rank)


class MetSums(Sums):
    sums_by = "threads"

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank, self._count = meeting, rank, 0

    def allreduce(self, tensor: torch.Tensor, wire: WireFormat = "float32", residual: Residual | None = None) -> Handle:
        with self._meeting.lock:
            self._meeting.posted[self._count][self._rank] = tensor.clone()
        self._count += 1
        return Met(self._meeting, self._count - 1, tensor)

    def close(self) -> None: ...


class Met(Handle):
    def __init__(self, meeting: Meeting, number: int, tensor: torch.Tensor) -> None:
        self._meeting, self._number, self._tensor, self._done = meeting, number, tensor, False

    def done(self) -> bool:
        with self._meeting.lock:
            posted = self._meeting.posted[self._number]
            if not self._done and len(posted) == len(self._meeting.ranks):
                self._tensor.copy_(torch.stack([posted[rank] for rank in self._meeting.ranks]).sum(0))
                self._done = True
        return self._done


class LogPlane(LocalPlane):
    """Of a rank to which its leader says all at once."""

    def __init__(self, rank: int, entries: Sequence[Entry]) -> None:
        super().__init__()
        self.rank, self._entries = rank, entries

    def receive(self) -> list[tuple[int, LogBatch]]:
        told, self._entries = self._entries, []
        return [(LEADER, LogBatch(told))] if told else []

    def send(self, message: object, to: int) -> None:
        assert to == LEADER


def scripted(seed: int, share: int, first_task: int) -> list[Entry]:
    """What a leader might have done: its two threads' doings in any order that the state machine lets them have."""
    drawn, entries, number = random.Random(seed), list[Entry](), first_task
    finished = 0  # tasks in no round
    open_task: Task | None = None
    contributing = folded = False

    def main_thread() -> None:
        nonlocal open_task, number, finished, folded
        if drawn.random() < 0.6 and not folded:
            entries.append(Applied(0))
        if open_task is None:
            open_task = Task(number, (((0, drawn.choice([share, share - 2])),),), 4, 0, 0, share=share)
            entries.extend([Coming(open_task), Began(open_task)])
            number += 1
        else:
            entries.extend([Closed(), Finished(open_task.number)])
            open_task, finished, folded = None, finished + 1, folded or contributing

    for round_number in range(ROUNDS):
        for _ in range(drawn.randrange(5)):
            main_thread()
        last = round_number == ROUNDS - 1
        if last and open_task is not None:
            main_thread()
        contributing = finished > 0 and (last or drawn.random() < 0.8)
        finished = 0 if contributing else finished
        entries.append(Joined(StartRound(round_number, frozenset(), 0, drain="end" if last else None), contributing))
        for _ in range(0 if last else drawn.randrange(4)):
            main_thread()
        entries.append(Landed(entries[-1].start if last else StartRound(round_number, frozenset(), 0)))
        contributing = folded = False
    return entries


def train(follower: Follower, replica: Replica, division: Division) -> None:
    optimizer = torch.optim.SGD(replica.parameters, 0.05, momentum=0.9)
    follower.start()
    while isinstance(work := follower.next_work(), Task):
        replica.run(batch_of(work, division))
        optimizer.step()
        optimizer.zero_grad()
        follower.close_slice(work)
        follower.finish(work, 0.0, 0.0)
    assert work.drain == "end"
    follower.stop()


def run(seed: int, stages: Sequence[Sequence[int]], division: Division) -> list[dict[str, torch.Tensor]]:
    """Two replicas, of which the first is cut, one block a stage or all, and the second is on the last rank; what each
    rank holds at the end. `division` of the first one's micro-batches."""
    torch.manual_seed(seed)
    model, other = Model(), sum(map(len, stages))
    found = cut(model, observed_call(model, loss, torch.ones(4, 4)))
    blocks = [block.parameters for block in found.graph.blocks]
    names = blocks if len(stages) == len(blocks) == 3 else [sum(blocks, ())]
    meetings = [Meeting((*ranks, other)) for ranks in stages]
    logs = [scripted(seed, SHARES[0], 0), scripted(seed + 1, SHARES[1], 1000)]
    held: list[dict[str, torch.Tensor]] = [{} for _ in range(other + 1)]

    def work(rank: int, channels: Channels) -> None:
        own, place = deepcopy(model), Stages(range(len(stages)), stages, [None] * len(stages), division.times)
        replica: Replica = WholeReplica(own, loss)
        if rank < other and len(stages) > 1:
            replica = StagedReplica(own, found, loss, place, rank, channels)
        state = {**dict(own.named_parameters()), **dict(own.named_buffers())}
        mine = [stage for stage, ranks in enumerate(stages) if rank in (*ranks, other)]
        segments = [
            Segment(
                [state[name] for name in names[stage] if state[name].requires_grad],
                [state[name] for name in names[stage] if not state[name].requires_grad],
                meetings[stage].sums_of(rank),
                speaks=rank in (stages[stage][0], other),
            )
            for stage in mine
        ]
        plane = LogPlane(rank, logs[rank == other])
        options = EngineOptions(batch=BATCH, timeout_seconds=20.0)
        follower = Follower(plane, LEADER, torch.device("cpu"), segments, options)
        train(follower, replica, WHOLE if rank == other else division)
        held[rank] = {name: state[name].detach() for stage in mine for name in names[stage]}

    on_threads(other + 1, work)
    return held


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("stages", [[(0,), (1,), (2,)], [(0,), (1,), (3, 2)], [(2, 3), (1,), (0,)]])
def test_three_stages_end_with_the_anchor_of_one_rank(stages: Sequence[Sequence[int]], seed: int) -> None:
    division = Division(stages, [StepTime(0.0, 1 / speed) for speed in SPEEDS])
    *ranks, other = run(seed, stages, division)
    whole, _ = run(seed, [(0,)], division)
    assert {name for each in ranks for name in each} == whole.keys()
    for own in ranks:
        for name, tensor in own.items():
            torch.testing.assert_close(tensor, whole[name], rtol=1e-6, atol=1e-6)
            assert torch.equal(tensor, other[name]), f"holders of {name} have other bits"
    assert not torch.equal(whole["b.running_mean"], torch.zeros(6))


def follower_of(entries: Sequence[Entry], weight: torch.Tensor, seconds: float = 20.0) -> Follower:
    segment = Segment([weight], [], Meeting((0,)).sums_of(0))
    options = EngineOptions(batch=BATCH, timeout_seconds=seconds)
    return Follower(LogPlane(0, entries), LEADER, torch.device("cpu"), [segment], options)


TASK = Task(0, (((0, 4),),), 4, 0, 0, share=4)


def closing(follower: Follower, work: Callable[[], object]) -> None:
    try:
        work()
    finally:
        follower.stop()


def test_a_rank_that_has_nothing_to_sum_follows_to_the_end() -> None:
    plane, options = LogPlane(0, scripted(1, SHARES[0], 0)), EngineOptions(batch=BATCH, timeout_seconds=20.0)
    follower = Follower(plane, LEADER, torch.device("cpu"), [], options)
    follower.start()
    while isinstance(work := follower.next_work(), Task):
        follower.close_slice(work)
        follower.finish(work, 0.0, 0.0)
    assert work.drain == "end"
    assert follower.bytes_sent == 0
    follower.stop()


def test_a_leader_that_has_nothing_to_sum_applies_where_its_followers_can() -> None:
    """Not while a round holds progress that has been followed by more."""
    segment = Segment([torch.ones(2)], [], Meeting((0,)).sums_of(0))
    applied = []
    for deltas in SegmentedDeltas([segment]), SegmentedDeltas([]):
        start, found = StartRound(0, frozenset(), 0), []
        deltas.finish(4, 1)
        deltas.pack(start, True, BATCH, "float32")
        found.append(deltas.apply())
        deltas.finish(4, 1)
        found.append(deltas.apply())
        deltas.apply_sum()
        found.append(deltas.apply())
        applied.append(found)
    assert applied == [[True, False, True]] * 2


def test_a_leader_that_says_nothing_is_named() -> None:
    follower = follower_of([], torch.ones(2), seconds=0.2)
    follower.start()
    with pytest.raises(StalledError, match="no word from rank 99, which leads"):
        closing(follower, follower.next_work)


def test_gradients_that_are_not_finite_are_this_ranks() -> None:
    weight = torch.ones(2)
    follower = follower_of([Began(TASK), Closed(), Finished(0)], weight)
    follower.start()
    assert follower.next_work() == TASK
    weight[0] = float("nan")
    follower.close_slice(TASK)
    with pytest.raises(UserError, match="the gradient became nan on rank 0"):
        closing(follower, lambda: follower.finish(TASK, 0.0, 0.0))


def test_a_failure_of_the_other_thread_ends_the_loop() -> None:
    class Broken(LogPlane):
        def receive(self) -> list[tuple[int, LogBatch]]:
            raise RuntimeError("broken")

    segment = Segment([torch.ones(2)], [], Meeting((0,)).sums_of(0))
    follower = Follower(Broken(0, []), LEADER, torch.device("cpu"), [segment], EngineOptions(batch=BATCH))
    follower.start()
    with pytest.raises(RuntimeError, match="broken"):
        closing(follower, follower.next_work)
