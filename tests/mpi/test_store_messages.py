"""Messages without MPI in particular.

mpirun -np N python -m pytest --with-mpi tests/mpi
"""

from __future__ import annotations

import pytest

from hetsync.plane.base import LateError
from hetsync.plane.mpi import MpiMessages
from hetsync.plane.rendezvous import rendezvous_by_messages
from hetsync.plane.store import StoreMessages

pytestmark = pytest.mark.mpi


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
