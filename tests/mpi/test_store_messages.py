"""Messages without MPI in particular.

mpirun -np N python -m pytest --with-mpi tests/mpi
"""

from __future__ import annotations

from typing import Any

import pytest
from planes import receive

from hetsync.errors import UserError
from hetsync.plane import codec
from hetsync.plane.base import LateError, PlaneError
from hetsync.plane.mpi import MpiMessages
from hetsync.plane.rendezvous import rendezvous_by_messages
from hetsync.plane.store import StoreMessages

pytestmark = [pytest.mark.mpi, pytest.mark.each_value]


@pytest.mark.parametrize("late", [0, -1])
def test_who_does_not_come_is_named(late: int) -> None:
    world = MpiMessages()
    if world.size == 1:
        pytest.skip("nobody to wait for")
    late %= world.size
    messages = StoreMessages(rendezvous_by_messages(world, 5.0))
    messages.barrier()
    messages._meetings._limit_seconds = 1.0
    if messages.rank != late:
        with pytest.raises(LateError, match=f"for rank {late} "):
            messages.gather_objects("here")
    # Their meetings are one apart now, so that they cannot close together; a listener that is left would wake when the
    # store ends with another process, and abort this one while it ends.
    messages._inbox.close()
    world.barrier()  # nobody ends before all have waited
    world.close()


class Refused:
    """Its class does not travel."""


@pytest.mark.parametrize(
    ("message", "error", "says"),
    [
        (Refused(), UserError, "Refused does not travel"),
        (codec.Encoded(codec._with_checksum(b"no pickle")), PlaneError, "a message that cannot be read: UnpicklingE"),
    ],
    ids=["refused", "no pickle"],
)
def test_what_cannot_be_read_is_raised(message: Any, error: type[Exception], says: str) -> None:
    """As over MPI: who does not hear of it would wait for ever."""
    world = MpiMessages()
    messages = StoreMessages(rendezvous_by_messages(world, 30.0))
    messages.send(message, to=(messages.rank + 1) % messages.size)
    with pytest.raises(error, match=says):
        receive(messages, 1)
    messages.close()
    world.close()
