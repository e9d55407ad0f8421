"""Nobody waits without a bound: who is late is asked, and named; who gives no sign of life may be excluded."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping

from hetsync.errors import announce
from hetsync.plane.base import Plane, StalledError, named, wait_limit
from hetsync.processes import Process
from hetsync.sync.messages import Alive, Exclude, Look, Probe, Seen
from hetsync.threads import LivedSeconds

PROBE_SECONDS = 2.0  # to answer a probe
LISTEN_SECONDS = 0.2
PEER_SECONDS = 2 * PROBE_SECONDS  # for a peer to ask a rank, and to end it
PROBES = 4  # in the time after which a rank is excluded
# The second rank gives the first so many times as long. Where the two do not hear each other any more, each has heard
# of the other in the time of a probe before, so the second has gone before it would have the first ended, too.
PATIENCE_OF_SECOND = 1.5

SILENT = "silent"

Sign = Probe | Alive | Look | Seen | Exclude


class Watchdog:
    """The clock over one rank's communication thread. The first rank finds out who is late, and watches the silence of
    all others; the second watches that of the first. Moments are seconds lived through."""

    def __init__(
        self,
        plane: Plane,
        version: Callable[[], int] | None,
        timeout_seconds: float,
        silent_seconds: float | None = None,
    ) -> None:
        """`version`, where the coordinator is: the number of rounds that are complete there. After `silent_seconds`
        without a sign of life a rank is excluded."""
        self.processes: Mapping[int, Process] = {}  # of all ranks
        self.excluded: dict[int, str] = {}  # by this rank's word, and why
        self._told: dict[int, dict[int, float]] = {}  # of the excluded, which peers were told to end it, and when
        self._accused: dict[int, float] = {}  # by others, for silence: when this rank has asked them
        self._plane = plane
        self._version = version
        self._limit_seconds = wait_limit(plane.rank, timeout_seconds) + (0 if version is not None else PROBE_SECONDS)
        patience = 1.0 if version is not None else PATIENCE_OF_SECOND
        self._silence = None if silent_seconds is None else Silence(patience * silent_seconds)
        self._lived = LivedSeconds()
        self._listened_at = self._moved_at = 0.0
        self._probed_at: float | None = None
        self._looked_at: float | None = None
        self._signs: dict[int, Alive] = {}
        self._seen: dict[int, Seen] = {}

    def moved(self) -> None:
        """Something happened, or nothing need happen now."""
        self._moved_at, self._probed_at, self._looked_at = self._lived.look(), None, None

    def heard(self, ranks: Iterable[int]) -> None:
        """Of these, something else than an answer."""
        if self._silence is not None:
            self._silence.heard(ranks)

    def answer(self, message: Sign, sign: Callable[[], Alive]) -> None:
        """The first rank asks for signs of life, and what peers see of each other, and the second asks the first for
        such a sign; who is asked answers."""
        match message:
            case Alive():
                self._signs[message.rank] = message
                self._accused.pop(message.rank, None)
                if self.excluded.get(message.rank) == SILENT:
                    self.readmit(message.rank)
                self.heard([message.rank])
            case Seen():
                self._seen[message.rank] = message
            case Probe():
                self.heard([message.by])
                if message.by == self._plane.members[0]:  # which knows more
                    self.moved()
                self._plane.send(sign(), message.by)
            case Look():
                self._plane.send(self._look(message.rank), self._plane.members[0])
            case Exclude() if message.if_silent:  # the word may be old, and what lay between them mended
                self._accused[message.rank] = self._lived.look()
                self._plane.send(Probe(self._plane.rank), message.rank)
            case Exclude():
                self._end(message.rank)

    def check(self, sign: Callable[[], Alive]) -> None:
        """Nothing happened this time. Raises StalledError when that has lasted too long."""
        now = self._lived.look()
        if now < self._moved_at + self._limit_seconds:
            return
        if self._version is None:
            if (mine := sign()).waiting:
                first = self._plane.members[0]
                told = self._told_of(first, mine)
                raise StalledError(f"no word from {named([first])} for {self._limit_seconds:.0f} s{told}")
        elif self._probed_at is None:
            self._probed_at, self._signs, self._seen = now, {self._plane.rank: sign()}, {}
            for rank in self._plane.members[1:]:
                self._plane.send(Probe(self._plane.rank), rank)
        elif now > self._probed_at + PROBE_SECONDS and self._looked_at is None:
            self._looked_at = now
            for rank in self._silent():
                self._ask_a_peer(rank)
        elif self._looked_at is not None and (not self._awaits_peers() or now > self._looked_at + PROBE_SECONDS):
            raise StalledError(self._report(self._version()))

    def _silent(self) -> list[int]:
        return [rank for rank in self._plane.members if rank not in self._signs]

    def _awaits_peers(self) -> bool:
        return any(rank not in self._seen and self._peer_of(rank) is not None for rank in self._silent())

    # Peers.

    def _peer_of(self, rank: int, besides: Container[int] = ()) -> int | None:
        """A rank that shares its host, and lives as far as this rank knows; best this one. None `besides` these."""
        if rank not in self.processes:
            return None
        host = self.processes[rank].host
        lives = [peer for peer in self._plane.members if peer != rank and peer in self._alive()]
        ours = [peer for peer in lives if self.processes[peer].host == host and peer not in besides]
        return self._plane.rank if self._plane.rank in ours else next(iter(ours), None)

    def _alive(self) -> set[int]:
        """As far as this rank knows: who has answered just now, or need not."""
        if self._probed_at is not None or self._silence is None:
            return {self._plane.rank, *self._signs}
        return set(self._plane.members) - self._silence.silent

    def _ask_a_peer(self, rank: int) -> None:
        peer = self._peer_of(rank)
        if peer == self._plane.rank:
            self._seen[rank] = self._look(rank)
        elif peer is not None:
            self._plane.send(Look(rank), peer)

    def _look(self, rank: int) -> Seen:
        process = self.processes[rank]
        return Seen(rank, process.state, process.stack())

    # Exclusion.

    def watch_silence(self) -> None:
        """Call often. Asks those who have said nothing for long, and excludes who does not answer either."""
        now = self._lived.look()
        if now < self._listened_at + LISTEN_SECONDS:
            return
        self._listened_at = now
        for rank in [rank for rank, asked_at in self._accused.items() if now > asked_at + PROBE_SECONDS]:
            del self._accused[rank]
            self._end(rank)
        if self._silence is None:
            return
        watched = self._watched()
        for rank in self._silence.to_be_asked(now, watched):
            self._plane.send(Probe(self._plane.rank), rank)
        for rank in self._silence.too_long(watched):
            self.exclude(rank, SILENT, f" for {self._silence.limit_seconds:.0f} s")

    def _watched(self) -> list[int]:
        """By this rank; also those who were excluded for silence, and may speak again."""
        first, *others = self._plane.members
        if self._version is None:
            others = [first] if others[:1] == [self._plane.rank] else []
        return [rank for rank in others if self.excluded.get(rank, SILENT) == SILENT]

    def exclude(self, rank: int, why: str, details: str = "") -> None:
        """End it by a peer on its host, which is a death to the others; by another one where it has not gone some
        seconds later. Nothing where it has none."""
        now, told = self._lived.look(), self._told.setdefault(rank, {})
        if any(now < told_at + PEER_SECONDS for told_at in told.values()):
            return
        peer = self._peer_of(rank, besides=told)
        if peer is None:
            return
        told[peer] = now
        if rank not in self.excluded:
            self.excluded[rank] = why
            process = self.processes[rank]
            host = process.host.split()[0]
            announce(f"hetsync: rank {rank} (process {process.pid} on {host}) is {why}{details}: it is excluded")
        if peer == self._plane.rank:
            self._end(rank)
        else:
            self._plane.send(Exclude(rank, if_silent=why == SILENT), peer)

    def readmit(self, rank: int) -> None:
        """It is not excluded any more, or another process now."""
        self.excluded.pop(rank, None)
        self._told.pop(rank, None)

    def _end(self, rank: int) -> None:
        """A process of this host, which says first what it sees of it."""
        seen = self._look(rank)
        announce(f"rank {rank} {_STATES[seen.state]}" + (f", at\n{seen.stack.rstrip()}" if seen.stack else ""))
        self.processes[rank].kill()

    # Last words.

    def _report(self, version: int) -> str:
        silent = self._silent()
        last = max(sign.joined for sign in self._signs.values())
        late = [rank for rank, sign in sorted(self._signs.items()) if sign.joined < last]
        computing = [rank for rank, sign in sorted(self._signs.items()) if not sign.waiting]
        report = f"nothing moved for {self._limit_seconds:.0f} s in round {version}"
        if silent:
            report += f"; no sign of life from {named(silent)}"
        if late:
            report += f"; {named(late)} has not joined it"
        if computing:
            report += f"; still on its task or its evaluation: {named(computing)}"
        report += " (raise run.timeout_seconds if the work takes that long)"
        return report + "".join(self._told_of(rank) for rank in sorted({*silent, *late, *computing}))

    def _told_of(self, rank: int, mine: Alive | None = None) -> str:
        """Of one who is late: where it is and what it does. Its whole stack goes to standard error."""
        sign = self._signs.get(rank) if mine is None else None
        if rank not in self.processes:
            return ""
        process = self.processes[rank]
        told = f"; rank {rank}: process {process.pid} on {process.host.split()[0]}"
        if sign is not None:
            told, stack = f"{told}, {sign.activity} for {sign.seconds:.0f} s", sign.stack
        else:
            if mine is not None and self._peer_of(rank) == self._plane.rank:
                self._seen[rank] = self._look(rank)
            seen = self._seen.get(rank)
            told, stack = (told, "") if seen is None else (f"{told}, which {_STATES[seen.state]}", seen.stack)
        if stack:
            announce(f"rank {rank} was at\n{stack.rstrip()}")
        return told


_STATES = {"runs": "runs", "stopped": "is stopped", "gone": "has gone"}


class Silence:
    """For how long others have given no sign of life. Pure: moments come in."""

    def __init__(self, limit_seconds: float) -> None:
        self.limit_seconds = limit_seconds
        self._now = 0.0  # the moment of the last look
        self._heard: dict[int, float] = {}
        self._asked: dict[int, float] = {}

    def heard(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._heard[rank] = self._now
            self._asked.pop(rank, None)

    def to_be_asked(self, moment: float, ranks: Iterable[int]) -> list[int]:
        """Of these, who has said nothing for a part of the limit, and has not been asked since."""
        self._now = moment
        late = []
        for rank in ranks:
            last = max(self._heard.setdefault(rank, self._now), self._asked.get(rank, 0.0))
            if self._now > last + self.limit_seconds / PROBES:
                self._asked[rank] = self._now
                late.append(rank)
        return late

    def too_long(self, ranks: Iterable[int]) -> list[int]:
        """Of these, who has been silent for the limit, although asked."""
        return [rank for rank in ranks if rank in self._asked and self._now > self._heard[rank] + self.limit_seconds]

    @property
    def silent(self) -> set[int]:
        """Who has been asked, and has not answered yet."""
        return set(self._asked)
