"""A rank that is killed while others share its device: these go on, with every sample."""

from __future__ import annotations

import pytest
from rank_jobs import job
from ranks import EPOCHS, SAMPLES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("bound", [0, 4])
def test_the_others_go_on_with_every_sample(bound: int, device: str) -> None:
    found = job("killed", device, bound, ranks=3, flags=("--with-ft", "ulfm"))
    assert found == {"applied": EPOCHS * SAMPLES, "failures": [2]}
