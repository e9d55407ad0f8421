"""What becomes of buffers: whose rule is known, and what ranks' changes become by each rule."""

from __future__ import annotations

import pytest
import torch
from elsewhere import OnMps, on
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hetsync.errors import UserError
from hetsync.sync.buffers import Change, Unruled, Writes, buffers_of, merged, saved_buffers, say
from hetsync.sync.deltas import Deltas


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.instance = nn.InstanceNorm1d(3, track_running_stats=True)
        self.plain = nn.BatchNorm1d(3, track_running_stats=False)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))
        self.old = nn.utils.spectral_norm(nn.Linear(3, 2))
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("bank", torch.zeros(4, 2))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("graph", torch.eye(3).to_sparse())
        self.register_buffer("cache", torch.zeros(1), persistent=False)


def test_modules_of_torch_need_no_word() -> None:
    model, vectors = Net(), ["spectral.parametrizations.weight.0._u", "spectral.parametrizations.weight.0._v"]
    statistics = [f"{norm}.{name}" for norm in ("norm", "instance") for name in ("running_mean", "running_var")]
    assert sorted(buffers_of(model, "mean")) == sorted([*statistics, *vectors, "old.weight_u", "old.weight_v"])
    assert list(buffers_of(model, "rows")) == [
        "ready",
        "norm.num_batches_tracked",
        "instance.num_batches_tracked",
    ]
    assert not buffers_of(model, "sum")


def test_a_script_tells_by_names_and_patterns() -> None:
    model = nn.ModuleList([Net(), Net()])
    assert say(model, {"0.bank": "rows", "*.seen": "sum", "queue": "rows"}, "here") == {"0.bank", "*.seen"}
    assert "0.bank" in buffers_of(model, "rows")
    assert "1.bank" not in buffers_of(model, "rows")
    assert list(buffers_of(model, "sum")) == ["0.seen", "1.seen"]
    with pytest.raises(UserError, match="here got 'last' for seen: use mean, sum, rows, min or max"):
        say(model, {"seen": "last"}, "here")  # type: ignore[dict-item]


def test_complex_numbers_have_no_least() -> None:
    model = nn.Module()
    model.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(UserError, match="here got 'min' for wave, whose numbers are complex: use mean, sum or rows"):
        say(model, {"*": "min"}, "here")


@pytest.mark.parametrize("name", ["bank", "seen"])
def test_what_has_no_rule_and_changes_is_refused_by_its_name(name: str) -> None:
    model = Net()
    unruled = Unruled(model)
    unruled.check()
    with torch.no_grad():
        getattr(model, name).add_(1)
    with pytest.raises(UserError, match=rf"{name} changed while .* buffers=\{{'{name}': rule\}}.*mean.*sum.*rows"):
        unruled.check()
    unruled.begin()
    unruled.check()


NUMBERS = torch.tensor([3, 5])


@pytest.mark.parametrize("kind", [torch.int64, torch.float64, torch.complex64])
def test_what_ranks_have_made_of_a_buffer_becomes_one(kind: torch.dtype) -> None:
    before = NUMBERS.to(kind)
    changes = [Change(torch.tensor([3, 9]).to(kind), 30), Change(torch.tensor([7, 13]).to(kind), 10)]
    assert merged("sum", before, changes).tolist() == [7, 17]
    assert merged("mean", before, changes).tolist() == [4, 10]
    assert merged("rows", before, changes).tolist() == [7, 9]
    assert merged("rows", before, changes).dtype is kind


@pytest.mark.parametrize("kind", [torch.int64, torch.float32, torch.bfloat16])
def test_of_ranges_the_least_and_the_greatest_that_was_written_hold(kind: torch.dtype) -> None:
    """Where all ranks begin anew with a range, or follow a batch's, what it was before is no bound."""
    before = torch.tensor([3, 5, 4]).to(kind)
    changes = [Change(torch.tensor(now).to(kind), 1) for now in ([3, 9, 4], [7, 8, 4], [6, 7, 4])]
    assert merged("min", before, changes).tolist() == [6, 7, 4]
    assert merged("max", before, changes).tolist() == [7, 9, 4]
    assert merged("min", before, changes).dtype is kind


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_a_round_tells_the_least_and_the_greatest_that_was_written(kind: torch.dtype) -> None:
    models = [nn.Module() for _ in range(3)]
    for model in models:
        model.register_buffer("low", torch.full((2, 2), torch.inf, dtype=kind).T)
        model.register_buffer("high", torch.tensor(-torch.inf, dtype=kind))
        model.register_buffer("bank", torch.zeros(2, dtype=kind))
        say(model, {"low": "min", "high": "max", "bank": "rows"}, "here")
    ranks = [Writes(model) for model in models]
    for model, value in zip(models[1:], (1 / 3, -0.3), strict=True):
        model.low[1] = value
        model.high.fill_(value)
        model.bank[1] = value
    models[2].low[0, 0] = 5
    told = [rank.find(torch.device("cpu"), torch.promote_types(kind, torch.float32)) for rank in ranks]
    for rank in ranks:
        rank.take(told)
    least, greatest = (float(torch.tensor(value, dtype=kind)) for value in (-0.3, 1 / 3))
    for model in models:
        assert model.low.tolist() == [[5, torch.inf], [least, least]]
        assert float(model.high) == greatest
        assert model.bank.tolist() == [0, greatest]
    with torch.no_grad():  # a range that begins anew
        models[0].high.fill_(-7.0)
    told = [rank.find(torch.device("cpu"), torch.promote_types(kind, torch.float32)) for rank in ranks]
    for rank in ranks:
        rank.take(told)
    assert [float(model.high) for model in models] == [-7, -7, -7]


def test_counters_hold_more_than_floats_can() -> None:
    before = torch.tensor(2**60)
    assert int(merged("sum", before, [Change(before + 1, 1), Change(before + 2, 1)])) == 2**60 + 3


def test_writes_reach_all_to_the_last_digit_and_the_lower_ranks_hold() -> None:
    models = [nn.Module() for _ in range(3)]
    for model in models:
        model.register_buffer("bank", torch.zeros(3, 2, dtype=torch.float64))
        model.register_buffer("queue", torch.zeros(2, 3).T)
        say(model, {"*": "rows"}, "here")
    ranks = [Writes(model) for model in models]
    models[1].bank[2] = torch.tensor([0.1, -torch.inf], dtype=torch.float64)
    models[2].bank[2] = 7.0
    models[2].bank[0, 1] = 1 / 3
    models[2].queue[2, 1] = 0.5
    told = [rank.find(torch.device("cpu")) for rank in ranks]
    assert [each.shape[1] for each in told] == [0, 2, 4]
    for rank in ranks:
        rank.take(told)
    for model in models:
        torch.testing.assert_close(
            model.bank, torch.tensor([[0, 1 / 3], [0, 0], [0.1, -torch.inf]], dtype=torch.float64), rtol=1e-14, atol=0
        )
        assert model.queue.tolist() == [[0, 0], [0, 0], [0, 0.5]]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(["train", "round", "apply"]), st.integers(0, 2), st.integers(1, 9)), max_size=40)
)
def test_in_delayed_mode_every_increment_counts_once(events: list[tuple[str, int, int]]) -> None:
    """Whatever shares, merged contributions, and rounds without some ranks."""
    counts = [torch.zeros(2) for _ in range(3)]
    ranks = [
        Deltas([torch.zeros(3)], buffers=[torch.zeros(2), count], rank=n, added=1) for n, count in enumerate(counts)
    ]
    added = 0

    def land(contributors: set[int]) -> None:
        addends = [rank.pack(n in contributors, 9, "float32") for n, rank in enumerate(ranks)]
        total = sum(addend.clone() for addend in addends)
        for addend in addends:
            addend.copy_(total)
        more = True
        while more:
            tails = sum(rank.tail.flat.clone() for rank in ranks)
            for rank in ranks:
                rank.tail.flat.copy_(tails)
            (more,) = {rank.tail.unpack() for rank in ranks}
        for rank in ranks:
            rank.apply_sum()

    for what, n, samples in events:
        if what == "train":
            counts[n] += samples
            added += samples
            ranks[n].finish(samples, 1)
        elif what == "round":
            land({other for other in range(3) if other != n})
        else:
            ranks[n].apply()
    land({0, 1, 2})
    for rank, count in zip(ranks, counts, strict=True):
        assert rank.anchor[-2:].tolist() == [added, added]
        rank.reset_to_anchor()
        assert count.tolist() == [added, added]


def test_each_saved_buffer_is_named_once() -> None:
    net = Net()
    both = nn.ModuleDict({"one": net, "two": net})
    names = [name for _, _, name, _ in saved_buffers(both)]
    assert "one.bank" in names
    assert not any(name.startswith("two.") or name.endswith("cache") for name in names)


def test_a_round_tells_what_was_written_on_a_device_without_double_precision() -> None:
    models = [nn.Module() for _ in range(2)]
    for model, kind in zip(models, (OnMps, torch.Tensor), strict=True):
        model.register_buffer("low", on(kind, torch.full((2,), torch.inf)))
        model.register_buffer("high", on(kind, torch.zeros(2)))
        say(model, {"low": "min", "high": "max"}, "here")
    ranks = [Writes(model) for model in models]
    for model, value in zip(models, (1 / 3, -0.3), strict=True):
        model.low[1] = value
        model.high[0] = value
    told = [rank.find(torch.device("cpu")) for rank in ranks]
    for rank in ranks:
        rank.take(told)
    for model in models:
        assert model.low.tolist() == [torch.inf, float(torch.tensor(-0.3))]
        assert float(model.high[0]) == float(torch.tensor(1 / 3))
