"""What one thread has queued on a GPU before what another queues after it.

A stream is worked off in order, and each thread has a current one. On the default stream of all threads, what a round
adds up and copies would come behind whole slices that the main thread has queued. So the communication thread has a
stream of its own, and where the two touch the same tensors, the second follows the first by an event:

    main thread      with order: deltas.finish(...)      slice ................ with order: deltas.apply()
    communication                                with order: deltas.pack(...) ... copies, sums ... with order: ...

A script may have streams of its own around its batches: `with torch.cuda.stream(mine)`. What HetSync's calls queue in
there is on these; between two batches the main thread is on its own stream again. So wherever the script has its turn
each of its streams follows the main thread's, and afterwards that one follows them. Which they are shows when the
script calls; until then the host waits.

What the main thread applies comes behind slices that are queued. Where a round needs nothing of that, it passes it; or
the slowest GPU would hold every round back, though it joins with zeros only.

Who may touch what, and when, is for locks and the protocol to say: this carries their order on to the device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from hetsync.plane.staging import Test, at_once


class DeviceOrder:
    """On a processor: operations are done when they return."""

    def follow(self) -> None:
        """What this thread queues from now on comes after what other threads had queued when they left."""

    def leave(self) -> None:
        """What this thread has queued so far comes before what others queue once they follow."""

    def __enter__(self) -> None:
        """As `follow`."""

    def __exit__(self, *failure: object) -> None:
        """As `leave`."""

    def applying(self) -> AbstractContextManager[object]:
        """As the order itself, of what another thread may pass."""
        return self

    def passing(self, apart: bool) -> AbstractContextManager[object]:
        """As the order itself; but where what is inside is `apart` from what another thread has queued last, and that
        was `applying`, it does not come after that, nor after what that waits for."""
        return self

    def wait(self) -> None:
        """Return once all that anybody has queued on the device is done."""

    def lead_script(self) -> None:
        """The script has its turn: what it queues, on whatever stream, comes after what this thread has queued."""

    def note_script(self) -> None:
        """The script calls in its turn, from the stream that it computes on."""

    def follow_script(self) -> None:
        """Its turn is over: what this thread queues from now on comes after what the script has queued."""

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Inside, this thread's operations do not queue behind those of others."""
        yield

    def keep(self, tensor: torch.Tensor) -> None:
        """This thread uses another's tensor: its memory is not used anew before what is queued here is done."""

    def read(self, values: torch.Tensor) -> tuple[torch.Tensor, Test]:
        """Begin to bring values to the host's memory, after what this thread has queued; there once it tests. `item`,
        `tolist` and `float` would wait."""
        return values, at_once


class StreamOrder(DeviceOrder):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        # By thread, each of which writes its own in one step: what it has left last, and what others follow who pass.
        self._left: dict[int, tuple[torch.cuda.Event, torch.cuda.Event | None]] = {}
        self._scripts: set[torch.cuda.Stream] = set()  # streams that it has called from
        self._leads: torch.cuda.Stream | None = None  # what these have followed last

    @property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def follow(self) -> None:
        self._follow(passes=False)

    def _follow(self, passes: bool) -> None:
        me, stream = threading.get_ident(), self._stream
        for thread, (newest, before) in self._left.copy().items():
            event = before if passes else newest
            if thread != me and event is not None:
                stream.wait_event(event)

    def __enter__(self) -> None:
        self.follow()

    def __exit__(self, *failure: object) -> None:
        self.leave()

    def leave(self) -> None:
        event = self._stream.record_event()
        self._left[threading.get_ident()] = event, event

    @contextmanager
    def applying(self) -> Iterator[None]:
        me = threading.get_ident()
        self.follow()
        try:
            yield
        finally:
            before, _ = self._left.get(me, (None, None))
            self._left[me] = self._stream.record_event(), before

    @contextmanager
    def passing(self, apart: bool) -> Iterator[None]:
        self._follow(passes=apart)
        try:
            yield
        finally:
            self.leave()

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def lead_script(self) -> None:
        self._leads = self._stream
        if not self._scripts:
            self.wait()
        for stream in self._scripts - {self._leads}:
            stream.wait_stream(self._leads)

    def note_script(self) -> None:
        stream = self._stream
        if stream not in self._scripts:
            self._scripts.add(stream)
            if self._leads is not None and stream != self._leads:
                stream.wait_stream(self._leads)  # from here on: what it has read before may be too old, this once

    def follow_script(self) -> None:
        mine = self._stream
        if not self._scripts:
            self.wait()
        for stream in self._scripts - {mine}:
            mine.wait_stream(stream)

    @contextmanager
    def beside(self) -> Iterator[None]:
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            yield

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._stream)

    def read(self, values: torch.Tensor) -> tuple[torch.Tensor, Test]:
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return pinned.copy_(values, non_blocking=True), self._stream.record_event().query


def device_order(device: torch.device) -> DeviceOrder:
    return StreamOrder(device) if device.type == "cuda" else DeviceOrder()
