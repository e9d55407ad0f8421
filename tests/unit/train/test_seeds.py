"""The seed that a script has set is the job's: first weights, order of samples, dropout."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hetsync
from hetsync.data import random_state
from hetsync.data.loader import EpochOrder
from hetsync.data.random_state import Chance, set_aside
from hetsync.train.checkpoint import complete

SAMPLES, BATCH = 60, 12
POINTS = TensorDataset(torch.rand(SAMPLES, 4), torch.arange(SAMPLES))


class Drawn(NamedTuple):
    weights: list[float]
    order: list[int]
    dropout: list[float]


def trained(after: Callable[[], object] = lambda: None, epochs: int = 1, **told: Any) -> Drawn:
    """What a job of one rank draws; `after`: what its script does after `join`, which is told so much."""
    order, dropout = [], []
    with hetsync.join(delay_bound=0, progress=False, **told) as job:
        after()
        model = torch.nn.Linear(4, 1)
        weights = model.weight.flatten().tolist()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer, loader = job.prepare(model, optimizer, DataLoader(POINTS, BATCH, shuffle=True))
        for _ in job.epochs(epochs):
            for points, indices in loader:
                order += indices.tolist()
                dropout.append(torch.rand(()).item())
                job.backward(model(points).mean())
                job.step()
    return Drawn(weights, order, dropout)


def seeded_before(script: int, **told: Any) -> Drawn:
    torch.manual_seed(script)
    return trained(**told)


def seeded_after(script: int, **told: Any) -> Drawn:
    return trained(lambda: torch.manual_seed(script), **told)


@pytest.mark.parametrize("seeded", [seeded_before, seeded_after])
def test_two_seeds_of_a_script_draw_all_of_it_otherwise(seeded: Callable[..., Drawn]) -> None:
    one, other, again = (seeded(seed) for seed in (1, 2, 1))
    assert one == again
    assert all(mine != its for mine, its in zip(one, other, strict=True))


def test_a_seed_of_join_comes_before_the_scripts() -> None:
    assert seeded_before(1, seed=7) == seeded_before(2, seed=7) != seeded_before(1, seed=8)
    assert seeded_after(1, seed=7).order == seeded_after(2, seed=7).order


def test_a_job_is_followed_by_one_of_the_same_seed() -> None:
    assert seeded_before(3) == trained()


def test_chance_goes_on_from_where_the_script_has_left_it() -> None:
    torch.manual_seed(4)
    np.random.seed(5)
    torch.rand(3), np.random.rand(700)
    expected = Chance.found()
    weights = torch.nn.Linear(4, 1).weight.flatten().tolist()
    sample = np.random.rand()
    expected.take()
    found = []
    assert trained(lambda: found.append(np.random.rand())).weights == weights
    assert found == [sample]


def test_what_a_script_has_seeded_is_told_from_what_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = torch.seed()
    monkeypatch.setattr(random_state, "_DRAWN_SEED", drawn)
    assert Chance.found().torch is None
    for seed in (0, 2**32, 2**64 - 1):
        torch.manual_seed(seed)
        assert Chance.found().seed == seed
    torch.manual_seed(5)
    monkeypatch.setattr(random_state, "_DRAWN_SEED", 5)  # it was set before HetSync was imported
    assert Chance.found().seed == 5


def test_numpys_seed_counts_where_it_alone_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_state, "_DRAWN_SEED", torch.seed())
    found = []
    for seed, drawn in ((1, 0), (2, 0), (1, 700), (2, 700)):
        np.random.seed(seed)
        np.random.rand(drawn)
        found.append(Chance.found().seed)
    assert found[:2] == [1, 2]
    assert len(set(found)) == 4


def test_a_seed_of_sixty_four_bits_has_an_order() -> None:
    torch.manual_seed(2**64 - 1)
    assert sorted(trained().order) == list(range(SAMPLES))
    one, other = (EpochOrder(SAMPLES, seed).indices([(0, SAMPLES)]) for seed in (2**63, 2**63 + 1))
    assert one != other


def test_a_resumed_run_keeps_its_seed(tmp_path: Path) -> None:
    told: dict[str, Any] = {"run": tmp_path, "resume": "auto", "checkpoint_every": 24, "keep_checkpoints": 9}
    whole = seeded_before(1, epochs=2, **told)
    for path in complete(tmp_path / "checkpoints"):  # as if it had died right after it saved there
        if not path.name.endswith("24"):
            shutil.rmtree(path)
    rest = seeded_before(20261128, epochs=2, **told)
    assert (rest.order, rest.dropout) == (whole.order[24:], whole.dropout[2:])


def test_a_trial_seeds_its_device_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[Any] = []
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: torch.tensor([1]))
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda kept: None)
    for module in (torch.cuda, torch.mps):
        monkeypatch.setattr(module, "manual_seed", lambda seed, name=module.__name__: seeded.append((name, seed)))
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeded.append("all"))
    draws = []
    for devices in ((), (torch.device("cpu"),), (torch.device("mps", 0),)):
        with set_aside(*devices, seed=7):
            draws.append((float(torch.rand(1)), float(np.random.rand())))
    assert seeded == [("torch.mps", 7)]
    assert len(set(draws)) == 1


def test_what_is_set_aside_leaves_an_apple_gpus_chance_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = torch.tensor([1])
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: drawn.clone())
    monkeypatch.setattr(torch.mps, "set_rng_state", drawn.copy_)
    with set_aside(torch.device("mps", 0)):
        drawn += 5
    assert drawn == 1
    with set_aside(torch.device("cpu")):
        drawn += 5
    assert drawn == 6, "nobody asks for what is not there"
