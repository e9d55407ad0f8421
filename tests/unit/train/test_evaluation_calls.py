"""Functions that a script hands over for evaluations: what cannot be called is refused before anybody waits for it."""

from __future__ import annotations

from typing import Any

import pytest

from hetsync.errors import UserError
from hetsync.train.evaluation import check_callable


def accuracy(model: Any, batch: Any) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [((), r"is called without arguments here \(missing"), ((1, 2, 3), r"is called with 3 arguments here \(too many")],
)
def test_who_hands_over_a_function_is_told_how_it_is_called(arguments: tuple[Any, ...], told: str) -> None:
    with pytest.raises(UserError, match=told):
        check_callable("job.evaluate", accuracy, *arguments)
    check_callable("job.evaluate", accuracy, 1, 2)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(UserError, match=r"job.evaluate got a int: give a function"):
        check_callable("job.evaluate", 3)
