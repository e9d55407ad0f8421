"""ConvLSTM: its cell is that of the paper, a prediction is its sample's own, and it learns how blobs move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import conv2d
from torch.utils.data import default_collate

from hetsync import models
from hetsync.data.sets.frame_prediction import Batch, frame_loss
from hetsync.data.sets.synthetic_frames import synthetic_frames
from hetsync.errors import UserError
from hetsync.models.conv_lstm import Cell, ConvLSTM

SMALL: dict[str, Any] = {"horizon": 3, "hidden": [6, 4], "kernel_size": 3, "patch": 2}
peephole_or_none = pytest.mark.parametrize("peephole", [True, False], ids=["peephole", "none"])


def build(**options: Any) -> ConvLSTM:
    """With peepholes that are not 0, as they are at first."""
    torch.manual_seed(0)
    model = models.build("conv_lstm", **{**SMALL, **options})
    assert isinstance(model, ConvLSTM)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("peepholes"):
                weight.normal_()
    return model


def random_batch(samples: int = 3, steps: int = 4, size: tuple[int, int] = (8, 6), horizon: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return {
        "frames": torch.rand(samples, steps, 1, *size, generator=generator),
        "targets": torch.rand(samples, horizon, 1, *size, generator=generator),
    }


def in_double(batch: Batch) -> Batch:
    return {key: value.double() for key, value in batch.items()}


@peephole_or_none
@pytest.mark.parametrize("size", [(8, 6), (7, 5), (1, 1), (16, 3)])
@pytest.mark.parametrize("steps", [1, 4])
def test_predictions_have_the_size_of_frames(peephole: bool, size: tuple[int, int], steps: int) -> None:
    predicted = build(peephole=peephole, patch=4)(random_batch(2, steps, size))
    assert predicted.shape == (2, 3, 1, *size)
    assert predicted.dtype == torch.float32
    assert predicted.isfinite().all()


def test_frames_are_filled_up_below_and_on_the_right() -> None:
    model, batch = build(patch=4), random_batch(size=(7, 5))
    filled = torch.zeros(3, 4, 1, 8, 8)
    filled[..., :7, :5] = batch["frames"]
    torch.testing.assert_close(model(batch), model({"frames": filled})[..., :7, :5])


@peephole_or_none
@pytest.mark.parametrize("inputs", [3, 0])
def test_a_cell_is_that_of_the_paper(peephole: bool, inputs: int) -> None:
    """Its equations have a convolution of x and one of h for each of four maps, and peepholes on three of these."""
    torch.manual_seed(0)
    cell = Cell(inputs, 5, 3, peephole, wraps=False).double()
    x, h, c = (torch.randn(2, channels, 7, 6).double() for channels in (inputs, 5, 5))
    holes = [torch.zeros(5).double()] * 3
    if cell.peepholes is not None:
        torch.nn.init.normal_(cell.peepholes)
        holes = list(cell.peepholes.flatten(1))
    weights, biases = cell.convolution.weight.split(5), cell.convolution.bias.split(5)

    def mapped(number: int, hole: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        of_x, of_h = weights[number].split([inputs, 5], 1)
        found = conv2d(h, of_h, padding=1) + biases[number][:, None, None] + hole[:, None, None] * seen
        return found + conv2d(x, of_x, padding=1) if inputs else found

    kept = torch.sigmoid(mapped(1, holes[1], c)) * c
    new_c = kept + torch.sigmoid(mapped(0, holes[0], c)) * torch.tanh(mapped(2, torch.zeros(5), c))
    new_h = torch.sigmoid(mapped(3, holes[2], new_c)) * torch.tanh(new_c)
    torch.testing.assert_close(cell(x, (h, c)), (new_h, new_c))


@peephole_or_none
def test_the_model_is_a_loop_of_cells(peephole: bool) -> None:
    """Over explicit patches: a channel is one of a patch's pixels, row by row."""
    model, batch = build(peephole=peephole).double(), in_double(random_batch())
    patches = (
        batch["frames"].squeeze(2).unflatten(3, (3, 2)).unflatten(2, (4, 2)).permute(0, 1, 3, 5, 2, 4).flatten(2, 3)
    )
    h = [torch.zeros(3, channels, 4, 3).double() for channels in (6, 4)]
    c = [torch.zeros_like(each) for each in h]
    for step in range(4):
        h[0], c[0] = model.encoder[0](patches[:, step], (h[0], c[0]))
        h[1], c[1] = model.encoder[1](h[0], (h[1], c[1]))
    for step in range(3):
        h[0], c[0] = model.forecaster[0](h[0][:, :0], (h[0], c[0]))
        h[1], c[1] = model.forecaster[1](h[0], (h[1], c[1]))
        weight, bias = model.projection.weight.flatten(1), model.projection.bias
        frame = torch.einsum("oc,ncyx->noyx", weight, torch.cat(h, 1)) + bias[:, None, None]
        pixels = frame.unflatten(1, (2, 2)).permute(0, 3, 1, 4, 2).reshape(3, 8, 6)
        torch.testing.assert_close(model(batch)[:, step, 0], pixels)


def test_where_frames_wrap_a_shift_around_them_shifts_predictions() -> None:
    model, batch = build(patch=2, wraps=True).double(), in_double(random_batch(size=(8, 6)))
    shifted = {"frames": batch["frames"].roll((2, 4), (3, 4))}
    torch.testing.assert_close(model(shifted), model(batch).roll((2, 4), (3, 4)))
    plain = build(patch=2).double()
    assert not torch.allclose(plain(shifted), plain(batch).roll((2, 4), (3, 4)), atol=1e-3)


@peephole_or_none
def test_a_prediction_depends_on_its_sample_alone(peephole: bool) -> None:
    model, batch = build(peephole=peephole).double(), in_double(random_batch(5))
    with torch.no_grad():
        together = model(batch)
        alone = torch.cat([model({key: value[[n]] for key, value in batch.items()}) for n in range(5)])
    assert together.std(0).max() > 1e-4
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)


def test_peepholes_are_used_and_can_be_left_out() -> None:
    model, batch = build(), random_batch()
    predicted = model(batch)
    holes = [name for name, _ in model.named_parameters() if "peepholes" in name]
    assert len(holes) == 4
    for name in holes:
        weight = model.get_parameter(name)
        for number in range(3):
            kept = weight.data[number].clone()
            weight.data[number] = 0
            assert not torch.equal(model(batch), predicted), (name, number)
            weight.data[number] = kept
    without = build(peephole=False)
    assert not [name for name, _ in without.named_parameters() if "peepholes" in name]
    without.load_state_dict(model.state_dict(), strict=False)
    for name in holes:
        model.get_parameter(name).data.zero_()
    torch.testing.assert_close(model(batch), without(batch))


@peephole_or_none
def test_every_weight_and_every_frame_counts(peephole: bool) -> None:
    model, batch = build(peephole=peephole), random_batch()
    frame_loss(model, batch).backward()
    assert all(weight.grad is not None and weight.grad.norm() > 0 for weight in model.parameters())
    for step in range(4):
        changed = batch["frames"].clone()
        changed[:, step] += 0.1
        assert not torch.equal(model({**batch, "frames": changed}), model(batch))


def test_targets_are_no_inputs() -> None:
    batch = random_batch()
    model = build()
    torch.testing.assert_close(model({"frames": batch["frames"]}), model(batch))


def test_half_precision_is_for_what_is_inside() -> None:
    model, batch = build(), random_batch()
    with torch.autocast("cpu", torch.bfloat16):
        predicted = model(batch)
        frame_loss(model, batch).backward()
    assert predicted.dtype == torch.float32
    torch.testing.assert_close(predicted, model(batch), rtol=0, atol=0.05)
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize(
    ("hidden", "weights"), [((256,), 13_524_496), ((128, 128), 10_042_896), ((128, 64, 64), 7_585_296)]
)
def test_sizes_of_the_paper(hidden: tuple[int, ...], weights: int) -> None:
    assert sum(weight.numel() for weight in ConvLSTM(hidden=hidden).parameters()) == weights


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"horizon": 0}, r"model\.options\.horizon is 0: it must be a whole number of at least 1"),
        ({"kernel_size": 4}, r"model\.options\.kernel_size is 4: it must be odd"),
        ({"kernel_size": 0}, r"model\.options\.kernel_size is 0"),
        ({"patch": 1.5}, r"model\.options\.patch is 1\.5"),
        ({"hidden": []}, r"model\.options\.hidden is \[\]: it must be a list of channels"),
        ({"hidden": 64}, r"model\.options\.hidden is 64: it must be a list of channels"),
        ({"hidden": "64"}, r"model\.options\.hidden is 64: it must be a list of channels"),
        ({"hidden": [8, 0]}, r"model\.options\.hidden is 0: it must be a whole number"),
        ({"peephole": "yes"}, r"model\.options\.peephole is yes"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as told:
        build(**options)
    assert "\n" not in str(told.value)


def test_the_horizon_is_the_data_s() -> None:
    data = synthetic_frames(clips=20, horizon=4)
    batch = default_collate([data.train[index] for index in range(3)])
    assert models.build_for(data, "conv_lstm", {"hidden": [4]})(batch).shape == (3, 4, 1, 16, 16)
    with pytest.raises(UserError, match=r"model\.options\.horizon is 5, but the data has 4"):
        models.build_for(data, "conv_lstm", {"horizon": 5})


@pytest.mark.each_value(1)
@peephole_or_none
def test_it_learns_how_blobs_move(peephole: bool) -> None:
    data = synthetic_frames(clips=800, size=8, steps=3, horizon=2, noise=0.02)
    train, test = (default_collate([part[index] for index in range(len(part))]) for part in (data.train, data.test))  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = ConvLSTM(horizon=2, hidden=[24], kernel_size=3, patch=2, peephole=peephole)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(200):
        rows = torch.randint(len(train["frames"]), (32,))
        optimizer.zero_grad()
        frame_loss(model, {key: value[rows] for key, value in train.items()}).backward()
        optimizer.step()
    with torch.no_grad():
        last, best = (frame_loss(data.baselines[name], test) for name in ("last frame", "best known"))
        assert best < frame_loss(model, test) < 0.5 * last


def test_cells_last_at_first() -> None:
    """Forget gates are open (Jozefowicz et al. 2015)."""
    torch.manual_seed(0)
    opened = Cell(3, 5, 3, peephole=True, wraps=False).convolution.bias
    torch.manual_seed(0)
    plain = torch.nn.Conv2d(8, 20, 3).bias
    torch.testing.assert_close(opened - plain, torch.tensor([0.0] * 5 + [1.0] * 5 + [0.0] * 10))
