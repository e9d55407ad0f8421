"""Accelerate's Accelerator on a HetSync job: scripts in its own words, and its own tests, from the installed package.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_accelerate.py
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from training import BATCH, SAMPLES, Blobs, Net, unequal_shares

from hetsync.data.loader import EpochOrder
from hetsync.errors import UserError
from hetsync.plane.base import Plane
from hetsync.sync.digests import weights_sha256

pytest.importorskip("accelerate")

from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from accelerate_jobs import end_job, no_state_left  # noqa: F401 - a fixture

from hetsync.neighbours.accelerate import STANDING, Accelerator, check

pytestmark = [pytest.mark.mpi, pytest.mark.each_value, pytest.mark.ranks(1, 2, 4)]

EPOCHS, SEED = 3, 4
SPLIT = DataLoaderConfiguration(split_batches=True)
BOUNDS = pytest.mark.parametrize("bound", [0, 4])


class Script:
    """As Accelerate's documentation writes it; `used` are the samples of each epoch, by their index."""

    def __init__(self, plane: Plane, bound: int = 0, accumulation: int = 1, batch: int = BATCH, **options: Any) -> None:
        options = {"dataloader_config": SPLIT, "pins": unequal_shares(plane.size, batch)} | options
        if plane.size == 1 or "pins" not in options or options["pins"] is None:
            options.pop("pins")
        self.accelerator = Accelerator(
            gradient_accumulation_steps=accumulation, plane=plane, delay_bound=bound, **options
        )
        torch.manual_seed(SEED)
        model, loader = Net(), DataLoader(Blobs(), batch, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
        torch.manual_seed(SEED)
        prepared = self.accelerator.prepare(model, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.used: list[list[int]] = []
        self.synchronised = 0

    def epoch(self, loader: Any = None, each: Callable[[], None] = lambda: None, only_when_due: bool = False) -> None:
        self.used.append([])
        for points, labels, numbers in self.loader if loader is None else loader:
            self.used[-1] += numbers.tolist()
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(cross_entropy(self.model(points), labels))
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    self.synchronised += 1
                self.optimizer.step()
                if self.accelerator.sync_gradients or not only_when_due:
                    self.scheduler.step()
                self.optimizer.zero_grad()
            each()


def plain(accumulation: int = 1, batch: int = BATCH, per_batch: int = 1) -> Net:
    """One process and nothing but PyTorch, which steps its scheduler so often a step."""
    net, data, order = Net(), Blobs(), EpochOrder(SAMPLES, SEED)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
    for epoch in range(EPOCHS):
        for start in range(0, SAMPLES, batch * accumulation):
            first, last = epoch * SAMPLES + start, epoch * SAMPLES + min(start + batch * accumulation, SAMPLES)
            numbers = order.indices([(first, last)])
            optimizer.zero_grad()
            cross_entropy(net(data.points[numbers]), data.labels[numbers]).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            for _ in range(per_batch):
                scheduler.step()
    return net


def assert_alike(net: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("only_when_due", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_at_bound_0_it_is_plain_training(plane: Plane, accumulation: int, only_when_due: bool) -> None:
    script = Script(plane, 0, accumulation)
    for _ in range(EPOCHS):
        script.epoch(only_when_due=only_when_due)
    assert_alike(script.model, plain(accumulation))
    assert script.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.8 ** (EPOCHS * 8 // accumulation // 3))
    assert script.synchronised == EPOCHS * 8 // accumulation
    script.accelerator.end_training()


def test_a_batch_is_of_each_process_and_schedulers_step_for_each(plane: Plane) -> None:
    batch = BATCH // plane.size
    script = Script(plane, batch=batch, dataloader_config=None, pins=None)
    assert len(script.loader) == SAMPLES // BATCH
    for _ in range(EPOCHS):
        script.epoch()
    assert_alike(script.model, plain(per_batch=plane.size))


@pytest.mark.parametrize("accumulation", [1, 2])
@BOUNDS
def test_each_sample_is_used_once_an_epoch(plane: Plane, bound: int, accumulation: int) -> None:
    script = Script(plane, bound, accumulation, pins=None)
    for _ in range(EPOCHS):
        script.epoch()
        used = script.accelerator.gather_object(script.used[-1])
        assert Counter(used) == Counter(range(SAMPLES))
    assert script.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.8 ** (EPOCHS * 8 // accumulation // 3))


@BOUNDS
def test_what_is_gathered_for_metrics_is_the_data_set_in_its_order(plane: Plane, bound: int) -> None:
    script, data = Script(plane, bound, pins=None), Blobs(37)
    loader = script.accelerator.prepare(DataLoader(data, 8))
    script.epoch()
    for _ in range(2):  # once more, as each epoch does
        found: list[int] = []
        names: list[str] = []
        for points, _, numbers in loader:
            assert len(points) <= 8
            found += script.accelerator.gather_for_metrics(numbers).tolist()
            names += script.accelerator.gather_for_metrics([f"sample {number}" for number in numbers.tolist()])
        assert found == list(range(37))
        assert names == [f"sample {number}" for number in range(37)]


def test_what_is_gathered_reduced_and_padded(plane: Plane) -> None:
    accelerator = Accelerator(plane=plane)
    mine, size = torch.full((2,), float(accelerator.process_index)), plane.size
    expected = torch.arange(size).repeat_interleave(2).float()
    assert torch.equal(accelerator.gather({"a": mine})["a"], expected)
    assert accelerator.gather(torch.tensor(3)).tolist() == [3] * size
    assert accelerator.reduce(mine).tolist() == [sum(range(size))] * 2
    assert accelerator.reduce(mine, "mean", scale=2.0).tolist() == [2 * sum(range(size)) / size] * 2
    padded = accelerator.pad_across_processes(torch.ones(1, accelerator.process_index + 1), dim=1, pad_index=-1)
    assert padded.tolist() == [[1.0] * (plane.rank + 1) + [-1.0] * (size - plane.rank - 1)]
    first = accelerator.pad_across_processes(torch.ones(accelerator.process_index + 1), pad_first=True)
    assert first.tolist() == [0.0] * (size - plane.rank - 1) + [1.0] * (plane.rank + 1)


def test_the_main_process_goes_first(plane: Plane, folder: Path) -> None:
    accelerator = Accelerator(plane=plane)
    with accelerator.main_process_first():
        assert (folder / "made").exists() is not accelerator.is_main_process
        (folder / "made").touch()


def test_a_triggered_end_is_known_to_all(plane: Plane) -> None:
    accelerator = Accelerator(plane=plane)
    assert not accelerator.check_trigger()
    if accelerator.is_last_process:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()


def saving_in(script: Script, folder: Path) -> Callable[[], None]:
    """In the second epoch, in two batches, of which an unequal rank may lack one."""

    def save() -> None:
        if 9 <= script.accelerator.job.step_count <= 10:
            script.accelerator.save_state(str(folder / "saved"))

    return save


@BOUNDS
def test_a_state_that_was_saved_in_the_loop_is_gone_on_with(
    plane: Plane, folder: Path, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, saved = Script(plane, bound, pins=None), []
    save = script.accelerator._save
    monkeypatch.setattr(script.accelerator, "_save", lambda *told: (saved.append(told), save(*told)))
    script.epoch()
    script.epoch(each=saving_in(script, folder))
    script.epoch()
    end_job()
    assert len(saved) == 1, "however many ranks have asked, and when"

    again = Script(plane, bound, pins=None)
    again.accelerator.load_state(str(folder / "saved"))
    at = again.accelerator.job.samples
    assert SAMPLES < at <= 2 * SAMPLES
    if at < 2 * SAMPLES:
        again.epoch(again.accelerator.skip_first_batches(again.loader, at % SAMPLES // BATCH))
    again.epoch()
    used = [number for each in again.used for number in again.accelerator.gather_object(each)]
    left = EpochOrder(SAMPLES, SEED).indices([(at, 2 * SAMPLES)]) if at < 2 * SAMPLES else []
    assert Counter(used) == Counter([*left, *range(SAMPLES)])
    if bound == 0:
        assert_alike(again.model, script.model)
        assert_alike(again.model, plain())


def test_a_loop_may_begin_within_an_epoch(plane: Plane) -> None:
    script = Script(plane, pins=None)
    script.epoch(script.accelerator.skip_first_batches(script.loader, 5))
    used = script.accelerator.gather_object(script.used[-1])
    assert Counter(used) == Counter(EpochOrder(SAMPLES, SEED).indices([(5 * BATCH, SAMPLES)]))


@BOUNDS
def test_training_ends_after_so_many_steps_whatever_ranks_have_counted(plane: Plane, bound: int) -> None:
    script = Script(plane, bound, max_steps=11)
    for _ in range(9):
        script.epoch()
    used = [number for each in script.used for number in script.accelerator.gather_object(each)]
    assert Counter(used) == Counter([*range(SAMPLES), *EpochOrder(SAMPLES, SEED).indices([(SAMPLES, 11 * BATCH)])])


def test_a_state_of_the_next_epoch_is_not_skipped_into(plane: Plane, folder: Path) -> None:
    script = Script(plane)
    script.epoch()
    script.accelerator.save_state(str(folder / "step_7"))  # by its name in the first epoch
    end_job()
    again = Script(plane)
    again.accelerator.load_state(str(folder / "step_7"))
    with pytest.raises(UserError, match="in the next epoch"):
        again.accelerator.skip_first_batches(again.loader, 7)


def test_a_second_training_is_one_sentence(plane: Plane) -> None:
    script = Script(plane)
    script.epoch()
    with pytest.raises(UserError, match="a process trains once"):
        script.accelerator.prepare(Net())


@pytest.mark.parametrize("text", ['{"samples": "many", "seed": 1}', "{", "{}"])
def test_a_damaged_state_is_one_sentence(plane: Plane, folder: Path, text: str) -> None:
    script = Script(plane)
    script.accelerator.save_state(str(folder / "saved"))
    plane.barrier()
    if plane.rank == 0:
        (folder / "saved" / STANDING).write_text(text)
    plane.barrier()
    with pytest.raises(UserError, match="is damaged"):
        script.accelerator.load_state(str(folder / "saved"))


def test_a_state_that_does_not_tell_where_it_stands_is_told(
    plane: Plane, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Saved by Accelerate alone, or not to its end."""
    script = Script(plane)
    script.accelerator.save_state(str(folder / "saved"))
    plane.barrier()
    if plane.rank == 0:
        (folder / "saved" / STANDING).unlink()
    plane.barrier()
    script.accelerator.load_state(str(folder / "saved"))
    told = "training begins at the first sample" in capfd.readouterr().err
    assert told is (plane.rank == 0)
    assert script.accelerator.job.samples == 0


class Counted:
    """State of a script's own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return vars(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def test_states_are_named_and_kept_with_what_is_registered(plane: Plane, folder: Path) -> None:
    options = {"project_config": ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)}
    script, counter = Script(plane, **options), Counted()
    script.accelerator.register_for_checkpointing(counter)
    for _ in range(EPOCHS):
        script.epoch()
        counter.count += 1
        script.accelerator.save_state()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    end_job()
    again, counter = Script(plane, **options), Counted()
    again.accelerator.register_for_checkpointing(counter)
    again.accelerator.load_state()
    assert (counter.count, again.accelerator.job.samples) == (EPOCHS, EPOCHS * SAMPLES)
    assert_alike(again.model, plain())


def test_any_order_of_what_is_prepared(plane: Plane) -> None:
    accelerator, net = Accelerator(plane=plane, delay_bound=0, dataloader_config=SPLIT), Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    things = accelerator.prepare(scheduler, DataLoader(Blobs(), BATCH, shuffle=True), None, optimizer, net)
    assert things[2:] == (None, optimizer, net)
    assert len(things[1]) == SAMPLES // BATCH


def test_values_of_gradients_are_clipped_as_in_one_process(plane: Plane) -> None:
    accelerator, net = Accelerator(plane=plane, delay_bound=0, dataloader_config=SPLIT), Net()
    torch.manual_seed(SEED)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(Blobs(), BATCH, shuffle=True))
    for points, labels, _ in loader:
        accelerator.backward(cross_entropy(net(points), labels))
        accelerator.clip_grad_value_(net.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    other, data, order = Net(), Blobs(), EpochOrder(SAMPLES, SEED)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    for start in range(0, SAMPLES, BATCH):
        numbers = order.indices([(start, start + BATCH)])
        optimizer.zero_grad()
        cross_entropy(other(data.points[numbers]), data.labels[numbers]).backward()
        nn.utils.clip_grad_value_(other.parameters(), 0.01)
        optimizer.step()
    assert_alike(net, other)


def test_a_scheduler_by_epoch_makes_a_step_a_process_as_accelerates(plane: Plane) -> None:
    script = Script(plane, dataloader_config=None, pins=None, batch=BATCH // plane.size)
    script.scheduler.step()
    assert script.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.8 ** (plane.size // 3))


def test_frozen_models_are_placed_and_not_trained(plane: Plane) -> None:
    script = Script(plane, pins=None)
    frozen = script.accelerator.prepare(Net().requires_grad_(False))
    script.epoch()
    assert_alike(frozen, Net())


class Packed(nn.Parameter):
    """Weights of four bits, two in a byte, with their scale beside, as libraries for GPUs keep them."""

    scale: torch.Tensor

    def __new__(cls, weight: torch.Tensor) -> Packed:
        scale = weight.abs().amax(1, keepdim=True)
        whole = ((weight / scale * 7).round() + 8).to(torch.uint8).flatten()
        made: Packed = torch.Tensor._make_subclass(cls, whole[::2] * 16 + whole[1::2], False)
        made.scale = scale
        return made

    def unpacked(self) -> torch.Tensor:
        whole = torch.stack([self.data // 16, self.data % 16], 1).view(len(self.scale), -1)
        return (whole.float() - 8) / 7 * self.scale


class Adapted(nn.Module):
    """A layer whose packed weight is frozen, with an adapter beside."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base, self.bias = Packed(layer.weight.data), layer.bias
        self.down = nn.Parameter(layer.weight.data[:2].clone())
        self.up = nn.Parameter(torch.zeros(len(layer.weight), 2))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(values, self.base.unpacked() + self.up @ self.down, self.bias)


@BOUNDS
def test_adapters_of_a_quantised_base_are_trained(plane: Plane, folder: Path, bound: int) -> None:
    accelerator = Accelerator(plane=plane, delay_bound=bound, run=folder / "run")
    model = Net()
    model.body[0], model.body[-1] = Adapted(model.body[0]), Adapted(model.body[-1])
    base = [layer.base.detach().clone() for layer in (model.body[0], model.body[-1])]
    optimizer = torch.optim.SGD((weight for weight in model.parameters() if weight.requires_grad), 0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Blobs(), 6, shuffle=True))
    losses = []
    for _ in range(EPOCHS):
        for points, labels, _ in loader:
            accelerator.backward(cross_entropy(model(points), labels))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(cross_entropy(model(Blobs().points), Blobs().labels).item())
    assert losses[-1] < losses[0]
    assert all(torch.equal(layer.base, kept) for layer, kept in zip((model.body[0], model.body[-1]), base, strict=True))
    assert len(set(accelerator.gather_object([weights_sha256(model.parameters())]))) == 1


def test_half_precision_runs_the_model_in_it(plane: Plane) -> None:
    script = Script(plane, mixed_precision="bf16")
    seen: list[torch.dtype] = []
    script.model.body[0].register_forward_hook(lambda module, given, made: seen.append(made.dtype))
    script.epoch()
    assert set(seen) <= {torch.bfloat16}
    assert all(weight.dtype is torch.float32 for weight in script.model.parameters())


MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "plugin": ({"deepspeed_plugin": object()}, {}, "got deepspeed_plugin"),
    "precision": ({}, {"precision": "bfloat16"}, "give mixed_precision"),
    "accumulation": ({}, {"accumulation": 2}, "give gradient_accumulation_steps"),
    "fp8": ({"mixed_precision": "fp8"}, {}, "take 'bf16' or 'fp16'"),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", MISTAKES)
def test_arguments_that_cannot_be_are_one_sentence(name: str) -> None:
    arguments, own, sentence = MISTAKES[name]
    with pytest.raises(UserError, match=sentence):
        check(arguments, own)


@pytest.mark.ranks(1)
def test_another_reduction_is_one_sentence(plane: Plane) -> None:
    with pytest.raises(UserError, match="give 'sum', 'mean' or 'none'"):
        Accelerator(plane=plane).reduce(torch.ones(1), "max")


@pytest.mark.ranks(1)
def test_training_on_data_that_do_not_shuffle_is_one_sentence(plane: Plane) -> None:
    accelerator, net = Accelerator(plane=plane), Net()
    loader, net = accelerator.prepare(DataLoader(Blobs(), BATCH), net)
    points, labels, _ = next(iter(loader))
    with pytest.raises(UserError, match="with shuffle=True"):
        accelerator.backward(cross_entropy(net(points), labels))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("method", ["gather", "reduce", "pad_across_processes", "gather_for_metrics"])
def test_nothing_is_gathered_while_a_batch_is_out(plane: Plane, method: str) -> None:
    script = Script(plane)
    with pytest.raises(UserError, match="while a batch is out"):
        script.epoch(each=lambda: getattr(script.accelerator, method)(torch.ones(1)))


# Accelerate's own tests, of its installed package. Those that are not here, and why:
# - rng_sync_check, dl_preparation_check, central_dl_preparation_check, custom_sampler_check, check_seedable_sampler*,
#   training_check: they look at which process has which samples, or draw the order by a generator of their own. Here
#   order and shares are HetSync's (what training_check shows is shown above, in HetSync's order).
# - test_noop_sync, test_distributed_sync*, test_gradient_accumulation*: they compute on one batch by hand, or gather
#   while a batch is out, on a loader that does not shuffle.
# - test_ops, test_distributed_data_loop, test_split_between_processes_tensor (its padding): functions of
#   accelerate.utils on a process group, and DDP's join.
THEIRS = [
    ("test_script", "init_state_check"),
    ("test_script", "process_execution_check"),
    ("test_script", "test_split_between_processes_list"),
    ("test_script", "test_split_between_processes_nested_dict"),
    ("test_script", "test_split_between_processes_evenly"),
    ("test_script", "test_trigger"),
    ("test_sync", "test_dataloader_break"),
]


@pytest.mark.parametrize(("module", "name"), THEIRS)
def test_accelerates_own(plane: Plane, folder: Path, module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = importlib.import_module(f"accelerate.test_utils.scripts.{module}")
    accelerator = Accelerator(plane=plane)
    monkeypatch.setattr(theirs, "Accelerator", Accelerator)
    monkeypatch.setattr(theirs, "gather_object", accelerator.gather_object, raising=False)
    monkeypatch.chdir(folder)  # one of them writes a file
    getattr(theirs, name)()
    plane.barrier()
