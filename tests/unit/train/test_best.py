"""The best value so far, when to stop, and evaluations of averages."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel

from hetsync.train.best import Best, Mode, Patience, is_better
from hetsync.train.evaluation import Evaluations, RankParts


@pytest.mark.parametrize(
    ("value", "best", "mode", "better"),
    [
        (0.5, None, "max", True),
        (0.6, 0.5, "max", True),
        (0.5, 0.5, "max", False),
        (0.4, 0.5, "min", True),
        (0.5, 0.5, "min", False),
        (math.nan, None, "min", False),
        (-math.inf, 0.5, "min", False),
    ],
)
def test_what_is_better(value: float, best: float | None, mode: Mode, better: bool) -> None:
    assert is_better(value, best, mode) is better


def test_patience_ends_with_evaluations_in_a_row() -> None:
    patience = Patience("loss", "min", 2)
    assert [patience.ends_with(loss) for loss in (3.0, 3.0, 2.0, 2.5, math.nan)] == [False, False, False, False, True]


def test_patience_goes_on_where_it_was() -> None:
    first, again, other = Patience("loss", "min", 2), Patience("loss", "min", 2), Patience("accuracy", "max", 2)
    first.ends_with(2.0)
    first.ends_with(3.0)
    for later in (again, other):
        later.load_state_dict(first.state_dict())
    assert again.ends_with(2.0)
    assert not other.ends_with(0.1)  # its first


def test_complex_weights_of_double_precision_are_kept_as_pairs(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1, dtype=torch.cdouble)
    Best(tmp_path).keep(0.5, "max", 10, model)
    found = load_file(tmp_path / "best" / "model.safetensors")
    model_again = torch.nn.Linear(2, 1, dtype=torch.cdouble)
    model_again.load_state_dict({name: torch.complex(*values.unbind(-1)) for name, values in found.items()})
    assert torch.equal(model_again.weight, model.weight)


def test_an_average_is_evaluated_in_evaluation_mode() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    average = AveragedModel(model)
    evaluations = Evaluations(parts=RankParts(0, 1), model=model, loaders=[], averages=[average])
    part = evaluations.part_of(lambda: (int(average.module[1].training), 1), [1])
    assert evaluations.result_of([part], None) == 0.0
    assert average.module[1].training
