"""CPU tensors run as though on CUDA streams, and PyTorch's CUDA sanitizer tells of races between these.

Streams and events are played: they tell the sanitizer what comes after what, as CUDA's do. The operations of a thread
are on its current stream. The order of what locks and threads do beside that is none: a race is told also where it
would not hurt in this run.

Memory that is dropped is used anew by the next operation on the stream that it was made on, as PyTorch's allocator may
have it: what another stream still does with it is a race, unless `record_stream` tells of that one. The host knows how
far a stream has come where it has waited for it, or has seen an event of it done; what one thread knows, the others do
not.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from functools import cache, partial
from itertools import count, islice
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.cuda import _sanitizer
from torch.cuda._sanitizer import FACTORY_FUNCTION_REGEX, Access, EventHandler, TensorInfo
from torch.utils._python_dispatch import TorchDispatchMode

import hetsync
from hetsync.data import loader, transfer
from hetsync.plane import staging
from hetsync.plane.staging import CudaStaging
from hetsync.sync import engine
from hetsync.sync.device_order import StreamOrder
from hetsync.sync.tail import Tail

CPU = torch.device("cpu")
LIBRARY = str(Path(hetsync.__file__).parent)
ON_STREAMS = "hetsync-communication", "hetsync-transfer"  # threads that queue work for a device
WAITING = "_local_scalar_dense", "equal"  # operations whose result the host waits for
WRITTEN = {"native_batch_norm": ("running_mean", "running_var")}  # whose schema does not tell


class PlayedStream:
    """`waited_for`: the host does each of its operations itself, as a library that is called with host memory."""

    def __init__(self, sanitizer: Sanitizer, name: str, waited_for: bool = False) -> None:
        self.sanitizer, self.name, self.waited_for = sanitizer, name, waited_for
        self.number = next(sanitizer.numbers)
        sanitizer.handler._handle_stream_creation(self.number)
        sanitizer.names[self.number] = name

    def record_event(self) -> PlayedEvent:
        return PlayedEvent(self)

    def wait_event(self, event: PlayedEvent) -> None:
        with self.sanitizer.lock:
            self.sanitizer.handler._handle_event_wait(event.number, self.number)

    def wait_stream(self, other: PlayedStream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.sanitizer.learn(self)


class PlayedEvent:
    """The host sees it done when it looks for the second time."""

    def __init__(self, stream: PlayedStream) -> None:
        self._sanitizer, self._looks = stream.sanitizer, 0
        self.number = next(stream.sanitizer.numbers)
        with stream.sanitizer.lock:
            stream.sanitizer.tell_what_is_known(stream)
            stream.sanitizer.handler._handle_event_creation(self.number)
            stream.sanitizer.handler._handle_event_record(self.number, stream.number)

    def query(self) -> bool:
        self._looks += 1
        if self._looks > 1:
            self._sanitizer.learn_of(self)
        return self._looks > 1


class HostEvent(threading.Event):
    """Whoever hears of it knows how far the thread that has set it knew streams to have come."""

    sanitizer: Sanitizer

    def set(self) -> None:
        self._known = dict(self.sanitizer.known)
        super().set()

    def is_set(self) -> bool:
        if found := super().is_set():
            self.sanitizer.learn_all(self._known)
        return found


class Memory:
    """Of a tensor and its views, which keep it alive."""

    def __init__(self, sanitizer: Sanitizer, home: PlayedStream | None, on_host: bool) -> None:
        self.number, self.home, self.on_host = next(sanitizer.numbers), home, on_host
        self.recorded: set[int] = set()  # streams
        self.waited_for: dict[int, int] = {}  # before it is used anew: how far streams have come
        self.sanitizer = sanitizer

    def __del__(self) -> None:
        self.sanitizer.drop(self)


class Sanitizer:
    """Attributes:
    races: What was told, in words.
    """

    def __init__(self) -> None:
        self.races: list[str] = []
        self.handler, self.lock, self.numbers = EventHandler(), threading.RLock(), count(1)
        self.names: dict[int, str] = {}  # of streams
        self.dropped: dict[PlayedStream, list[Memory]] = {}  # by its home
        self._here = threading.local()

    @property
    def told(self) -> str:
        """Each race once."""
        return "\n".join(f"{times} x {race}" for race, times in Counter(self.races).most_common(12))

    # Streams.

    @property
    def known(self) -> dict[int, int]:
        """How far this thread knows streams to have come."""
        return self._here.__dict__.setdefault("known", {})  # type: ignore[no-any-return]

    def current_stream(self, device: object = None) -> PlayedStream:
        return self._here.stream  # type: ignore[no-any-return]

    def new_stream(self, device: object = None) -> PlayedStream:
        return PlayedStream(self, f"a stream of {threading.current_thread().name}")

    @contextmanager
    def on(self, stream: PlayedStream) -> Iterator[None]:
        before, self._here.stream = self._here.stream, stream
        try:
            yield
        finally:
            self._here.stream = before

    @contextmanager
    def library(self) -> Iterator[None]:
        """Inside, this thread's operations are the host's, in memory where it must have seen that copies are done."""
        with self.on(PlayedStream(self, "a library", waited_for=True)):
            yield

    @contextmanager
    def entered(self, default: PlayedStream) -> Iterator[None]:
        """Inside, this thread's operations are on streams, first on this one: the default one of its rank."""
        self._here.stream = self._here.default = default
        with _Mode(self):
            yield

    def rank(self) -> AbstractContextManager[None]:
        """Inside, this thread is a rank's main thread."""
        return self.entered(PlayedStream(self, "the default stream"))

    def start(self, start: Callable[[threading.Thread], None], thread: threading.Thread) -> None:
        """In place of Thread.start."""
        if thread.name in ON_STREAMS:
            run, default = thread.run, self._here.default

            def entered() -> None:
                with self.entered(default):
                    run()

            thread.run = entered  # type: ignore[method-assign]
        start(thread)

    # What the host knows.

    def learn(self, stream: PlayedStream) -> None:
        """This thread has waited for the stream."""
        with self.lock:
            self.learn_all(self.handler.syncs.current_sync_states[stream.number])

    def learn_of(self, event: PlayedEvent) -> None:
        with self.lock:
            self.learn_all(self.handler.syncs.recorded_sync_states[event.number])

    def learn_all(self, known: dict[int, int]) -> None:
        self.handler.syncs._state_wait_for_other(self.known, known)

    def synchronize(self, device: object = None) -> None:
        """This thread has waited for all streams."""
        with self.lock:
            for known in self.handler.syncs.current_sync_states.values():
                self.learn_all(known)

    def tell_what_is_known(self, stream: PlayedStream) -> None:
        """What this thread queues now comes after that."""
        self.handler.syncs._state_wait_for_other(self.handler.syncs.current_sync_states[stream.number], self.known)

    # Memory.

    def memory(self, tensor: torch.Tensor, home: PlayedStream | None = None, on_host: bool = False) -> Memory:
        storage = tensor.untyped_storage()
        found: Memory | None = getattr(storage, "played", None)
        if found is None or found.sanitizer is not self:
            found = storage.played = Memory(self, home, on_host)  # type: ignore[attr-defined]
        return found

    def record_stream(self, tensor: torch.Tensor, stream: PlayedStream) -> None:
        self.memory(tensor).recorded.add(stream.number)

    def drop(self, memory: Memory) -> None:
        with self.lock:
            for known in [self.known, *(self.handler.syncs.current_sync_states[each] for each in memory.recorded)]:
                self.handler.syncs._state_wait_for_other(memory.waited_for, known)
            if memory.home is not None:
                self.dropped.setdefault(memory.home, []).append(memory)

    def _use_dropped_anew(self, home: PlayedStream) -> None:
        with self.lock:
            self.tell_what_is_known(home)
            for memory in self.dropped.pop(home, []):
                found = self.handler.tensors_accessed.accesses.pop(memory.number, TensorInfo(None))
                for access in [*found.reads, *([found.write] if found.write else [])]:
                    waited_for = access.seq_num <= memory.waited_for.get(access.stream, -1)
                    if not (waited_for or self._comes_after(home.number, access)):
                        self.races.append(
                            f"memory is used anew on {home.name} while it is used by {self._told(access)}"
                        )

    def _comes_after(self, stream: int, access: Access) -> bool:
        return self.handler.syncs.is_ordered_after(stream, access.seq_num, access.stream)

    # Operations.

    def run(self, operation: Any, words: tuple[Any, ...], named: dict[str, Any]) -> Any:
        stream = self.current_stream()
        pinned = named.pop("pin_memory", None)
        self._use_dropped_anew(stream)
        by_use: dict[Use, list[Memory]] = {use: [] for use in Use}
        for place, (name, use) in enumerate(_uses(operation)):
            given = words[place] if place < len(words) else named.get(name)
            by_use[use] += map(self.memory, _tensors(given))
        read, written, described = by_use.values()
        result = operation(*words, **named)
        used = read + written
        on_host = bool(pinned) or (bool(used) and all(memory.on_host for memory in used))
        made = [self.memory(tensor, stream, on_host) for tensor in _tensors(result)]
        written += [memory for memory in made if memory not in used + described]
        if not on_host:
            self._launch(stream, operation, read, written)
        if stream.waited_for or _name(operation) in WAITING:
            self.learn(stream)
        return result

    def _launch(self, stream: PlayedStream, operation: Any, read: list[Memory], written: list[Memory]) -> None:
        writes = {memory.number for memory in written if not memory.on_host}
        reads = {memory.number for memory in read if not memory.on_host} - writes
        if not reads | writes:  # a view
            return
        with self.lock:
            self.tell_what_is_known(stream)
            unnamed: dict[int, list[str]] = {number: [] for number in reads | writes}
            errors = self.handler._handle_kernel_launch(stream.number, reads, writes, set(), str(operation), unnamed)
            for error in errors:
                now, before = error.current_access, error.previous_access  # type: ignore[attr-defined]
                self.races.append(f"{self._told(now)} does not come after {self._told(before)}")

    def _told(self, access: Access) -> str:
        where = [f"{Path(code.co_filename).stem}.{code.co_name}" for code in access.stack_trace]
        return f"{where[0] if where else 'the script'} ({access.operator}) on {self.names[access.stream]}"


class Use(Enum):
    """Of an operation's argument."""

    READ = auto()
    WRITTEN = auto()
    DESCRIBED = auto()  # a view is made of it, or memory like it


@cache
def _uses(operation: Any) -> list[tuple[str, Use]]:
    """By the arguments' names."""
    found = []
    name = _name(operation)
    for argument in operation._schema.arguments:
        alias = argument.alias_info
        if (alias is not None and alias.is_write) or argument.name in WRITTEN.get(name, ()):
            use = Use.WRITTEN
        elif alias is not None or FACTORY_FUNCTION_REGEX.match(name):
            use = Use.DESCRIBED
        else:
            use = Use.READ
        found.append((argument.name, use))
    return found


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
        yield value


def _name(operation: Any) -> str:
    return str(operation._schema.name).removeprefix("aten::")


def _innermost(frames: Iterator[tuple[FrameType, int]], lookup_lines: bool) -> list[CodeType]:
    """In place of whole stack traces, which take most of the sanitizer's time: the library's function."""
    return list(islice((frame.f_code for frame, _ in frames if frame.f_code.co_filename.startswith(LIBRARY)), 1))


class _Mode(TorchDispatchMode):
    def __init__(self, sanitizer: Sanitizer) -> None:
        super().__init__()
        self._sanitizer = sanitizer

    def __torch_dispatch__(self, operation: Any, types: Any, words: Any = (), named: Any = None) -> Any:
        return self._sanitizer.run(operation, words, dict(named or {}))


class PlayedTransfer(transfer.PinnedTransfer):
    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()


@contextmanager
def sanitized_streams() -> Iterator[Sanitizer]:
    """Inside, each thread that has entered is on streams, and so are jobs whose main threads have."""
    sanitizer = Sanitizer()
    make_tail = Tail.__init__

    def made_tail(tail: Tail, *words: Any, **named: Any) -> None:
        make_tail(tail, *words, **named)
        sanitizer.memory(tail.counts).on_host = True

    with pytest.MonkeyPatch.context() as patch:
        extract = SimpleNamespace(extract=_innermost)
        patch.setattr(_sanitizer, "traceback", SimpleNamespace(StackSummary=extract, walk_stack=traceback.walk_stack))
        patch.setattr(torch.cuda, "Stream", sanitizer.new_stream)
        patch.setattr(torch.cuda, "stream", sanitizer.on)
        patch.setattr(torch.cuda, "current_stream", sanitizer.current_stream)
        patch.setattr(torch.cuda, "synchronize", sanitizer.synchronize)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: sanitizer.record_stream(tensor, stream))
        patch.setattr(HostEvent, "sanitizer", sanitizer, raising=False)
        patch.setattr(engine, "threading", SimpleNamespace(Event=HostEvent))
        start = threading.Thread.start
        patch.setattr(threading.Thread, "start", lambda thread: sanitizer.start(start, thread))
        patch.setattr(Tail, "__init__", made_tail)
        patch.setattr(engine, "device_order", StreamOrder)
        patch.setattr(staging, "HostStaging", partial(CudaStaging, CPU, direct=True))
        patch.setattr(loader, "_samples_at_once", lambda source, device: 0)
        patch.setattr(loader, "transfer_to", PlayedTransfer)
        patch.setattr(transfer, "_used_on", lambda stream, tensor: sanitizer.record_stream(tensor, stream))
        yield sanitizer
