"""What works in a loop: optimizers, models, schedules.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_loops_models.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import BOUNDS, EPOCHS, RESUMED_AT, SAMPLES, Result, Script, Seen, check, check_resumed, loader, settled
from torch import nn
from torch.nn.functional import cross_entropy, softplus
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from training import CLASSES, FEATURES, Blobs, Net

from hetsync.plane.base import Plane

# Four ranks show nothing that two do not: sums and staleness are test_engine.py's, loops of four test_job_leaving.py's.
pytestmark = [
    pytest.mark.mpi,
    pytest.mark.each_value,
    pytest.mark.ranks(1, 2),
    pytest.mark.parametrize("bound", BOUNDS),
]

Optimizers = Callable[[Net], list[Optimizer]]


def loss_on_all(model: nn.Module) -> float:
    data = Blobs(SAMPLES)
    with settled(model):
        return cross_entropy(model(data.points), data.labels).item()


def classify(
    make_optimizers: Optimizers,
    make_model: Callable[[], Any] = Net,
    before_epoch: Callable[[int, Any, list[Optimizer]], None] = lambda epoch, model, optimizers: None,
    before_batch: Callable[[int, int, Any], None] = lambda epoch, number, model: None,
    after_epoch: Callable[[int, Any], None] = lambda epoch, model: None,
) -> Script:
    """An ordinary script."""

    def script(job: Any, seen: Seen) -> Result:
        model = make_model()
        optimizers = make_optimizers(model)
        first = loss_on_all(model)
        *_, batches = job.prepare(model, *optimizers, loader())
        for epoch in job.epochs(EPOCHS):
            before_epoch(epoch, model, optimizers)
            for number, (points, labels, indices) in enumerate(batches):
                before_batch(epoch, number, model)
                seen.indices[epoch] += indices.tolist()
                job.backward(cross_entropy(model(points), labels))
                job.step()
            seen.at_rest(model, optimizers=tuple(optimizers))
            after_epoch(epoch, model)
        return Result(model, loss_on_all(model), first)

    return script


# Optimizers.


def sgd(model: nn.Module) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=0.2)]


def adamw(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=0.02)]


def two_groups(model: Net) -> list[Optimizer]:
    first, last = model.body[0], model.body[-1]
    groups = [{"params": first.parameters(), "lr": 0.02}, {"params": last.parameters()}]
    return [SGD(groups, lr=0.04, momentum=0.9)]


def decayed_and_not(model: Net) -> list[Optimizer]:
    """As transformers are trained: biases without weight decay."""
    weights = [weight for weight in model.parameters() if weight.ndim > 1]
    biases = [weight for weight in model.parameters() if weight.ndim == 1]
    return [AdamW([{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}], lr=0.01)]


def two_kinds(model: Net) -> list[Optimizer]:
    return [
        AdamW(model.body[0].parameters(), lr=0.01),
        SGD(model.body[-1].parameters(), lr=0.04, momentum=0.9),
    ]


@pytest.mark.parametrize(
    "make_optimizers",
    [
        two_groups,
        decayed_and_not,
        two_kinds,
        lambda model: [RMSprop(model.parameters(), lr=0.003)],
        lambda model: [Adagrad(model.parameters(), lr=0.05)],
        lambda model: [SGD(model.parameters(), lr=0.04, nesterov=True, momentum=0.9)],
        lambda model: [SGD([weight], lr=0.2) for weight in model.parameters()],
    ],
    ids=["groups", "decays", "kinds", "rmsprop", "adagrad", "nesterov", "one each"],
)
def test_optimizers(plane: Plane, bound: int, make_optimizers: Optimizers) -> None:
    check(plane, classify(make_optimizers), bound)


def test_two_backward_calls_and_two_optimizers(plane: Plane, bound: int) -> None:
    """One loss for each of two heads on a trunk: gradients of the trunk add up."""

    def script(job: Any, seen: Seen) -> Result:
        model = nn.ModuleDict({"trunk": Net(), "head": nn.Linear(CLASSES, CLASSES)})
        trunk, head = AdamW(model["trunk"].parameters(), lr=0.01), SGD(model["head"].parameters(), lr=0.1)
        first = loss_on_all(model["trunk"])
        *_, batches = job.prepare(model, trunk, head, loader())
        for epoch in job.epochs(EPOCHS):
            for points, labels, indices in batches:
                seen.indices[epoch] += indices.tolist()
                scores = model["trunk"](points)
                job.backward(0.5 * cross_entropy(scores, labels) + 0.5 * cross_entropy(model["head"](scores), labels))
                job.step(trunk, head)
            seen.at_rest(model)
        return Result(model, loss_on_all(model["trunk"]), first)

    check(plane, script, bound)


# Models that change on the way.


def freeze_by_turns(epoch: int, model: Any, _: list[Optimizer]) -> None:
    """In the first epoch the last layers only, then all, then the first layers only."""
    for name, weight in model.named_parameters():
        is_first = name.startswith("body.0")
        weight.requires_grad_(epoch == 1 or is_first == (epoch == 2))


@pytest.mark.parametrize("batch_norm", [False, True])
def test_layers_are_frozen_and_unfrozen_between_epochs(plane: Plane, bound: int, batch_norm: bool) -> None:
    """Batch norm takes statistics of a slice, so only without it is the result that of one process."""

    def freeze(epoch: int, model: Any, optimizers: list[Optimizer]) -> None:
        freeze_by_turns(epoch, model, optimizers)
        norm = model.body[2] if batch_norm else nn.Identity()
        norm.eval() if batch_norm and epoch != 1 else norm.train()

    script = classify(adamw, lambda: Net(batch_norm=batch_norm), before_epoch=freeze)
    check(plane, script, bound, equal=not batch_norm or plane.size == 1)


def test_layers_are_frozen_in_the_loop(plane: Plane, bound: int) -> None:
    """From a batch of the second epoch on; the next one finds them so."""

    def freeze(epoch: int, number: int, model: Any) -> None:
        model.body[0].requires_grad_(epoch == 0 or (epoch == 1 and number < 4))

    check(plane, classify(adamw, before_batch=freeze), bound)


def test_frozen_batch_norm_is_that_of_one_process(plane: Plane, bound: int) -> None:
    def freeze(epoch: int, model: Any, _: list[Optimizer]) -> None:
        model.body[2].eval().requires_grad_(epoch == 1)

    script = classify(
        lambda model: [SGD(model.parameters(), lr=0.2)], lambda: Net(batch_norm=True), before_epoch=freeze
    )
    check(plane, script, bound)


def growing(kind: Any) -> Script:
    """Its first layer is thawed in the second epoch, with a group of its own."""

    def thaw(epoch: int, model: Any, optimizers: list[Optimizer]) -> None:
        if epoch == 1 and len(optimizers[0].param_groups) == 1:
            model.body[0].requires_grad_(True)
            optimizers[0].add_param_group({"params": model.body[0].parameters(), "lr": 0.03})

    def make_model() -> Net:
        model = Net()
        model.body[0].requires_grad_(False)
        return model

    def optimizers(model: Net) -> list[Optimizer]:
        return [kind(model.body[-1].parameters(), lr=0.05)]

    return classify(optimizers, make_model, before_epoch=thaw)


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_groups_added_between_epochs(plane: Plane, bound: int, kind: Any) -> None:
    check(plane, growing(kind), bound)


def test_rates_set_by_hand_between_epochs(plane: Plane, bound: int) -> None:
    def lower(epoch: int, model: Any, optimizers: list[Optimizer]) -> None:
        for group in optimizers[0].param_groups:
            group["lr"] = (0.2, 0.1, 0.02)[epoch]

    _, seen = check(plane, classify(sgd, before_epoch=lower), bound)
    assert seen.rates == [[0.2], [0.1], [0.02]]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, 8)
        self.again, self.last = nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.again.weight = self.second.weight

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(self.again(self.second(self.first(points).tanh()).tanh()))
        return scores


def test_tied_weights(plane: Plane, bound: int) -> None:
    result, _ = check(plane, classify(lambda model: [AdamW(model.parameters(), lr=0.01)], Tied), bound)
    assert isinstance(result.model, Tied)
    assert result.model.again.weight is result.model.second.weight


def test_weights_in_no_optimizer_stay(plane: Plane, bound: int) -> None:
    def optimizers(model: Any) -> list[Optimizer]:
        return [AdamW(model.body[0].parameters(), lr=0.03)]

    result, _ = check(plane, classify(optimizers), bound)
    assert torch.equal(result.model.body[-1].weight, Net().body[-1].weight)


@pytest.mark.parametrize("at", RESUMED_AT)
def test_frozen_layers_over_a_resume(plane: Plane, folder: Path, bound: int, at: int) -> None:
    """What was frozen in the first epoch is so in the second, which the script does not begin with that."""

    def freeze(epoch: int, model: Any, _: list[Optimizer]) -> None:
        if epoch == 0:
            model.body[0].requires_grad_(False)

    check_resumed(plane, folder, classify(sgd, before_epoch=freeze), bound, at)


@pytest.mark.parametrize("thawed", [False, True])
@pytest.mark.parametrize("at", RESUMED_AT)
def test_layers_frozen_after_an_epoch_over_a_resume(
    plane: Plane, folder: Path, bound: int, at: int, thawed: bool
) -> None:
    """By lines that a resumed run does not come to; those that unfreeze it come before its first batch, or later."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []  # first and last layer before each batch

    def make_model() -> Net:
        found.clear()
        return Net()

    def freeze(epoch: int, model: Any) -> None:
        if epoch == 0:
            model.body[0].requires_grad_(False)

    def thaw(epoch: int, model: Any, _: list[Optimizer]) -> None:
        if epoch == 2 and thawed:
            model.body[0].requires_grad_(True)

    def look(epoch: int, number: int, model: Any) -> None:
        found.append((model.body[0].weight.detach().clone(), model.body[-1].weight.detach().clone()))

    script = classify(adamw, make_model, before_epoch=thaw, before_batch=look, after_epoch=freeze)
    _, (resumed, _) = check_resumed(plane, folder, script, bound, at, rates=False)  # which runs it once more
    first, last = found[0]
    assert torch.equal(resumed.model.body[0].weight, first) is (not thawed)
    assert not torch.equal(resumed.model.body[-1].weight, last)


@pytest.mark.parametrize("at", RESUMED_AT)
def test_groups_over_a_resume(plane: Plane, folder: Path, bound: int, at: int) -> None:
    check_resumed(plane, folder, growing(AdamW), bound, at)


# Two models that take turns.


def gan(every: int = 1, detach: bool = True, toggle: bool = False, noise: int = 4) -> Script:
    """Its generator has to find the mean of the data. Noise is of the samples, the same on any rank."""

    def fake(generator: nn.Module, points: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = generator(torch.sin(100 * points[:, :noise]))
        return made

    def script(job: Any, seen: Seen) -> Result:
        torch.manual_seed(7)
        models = nn.ModuleDict(
            {
                "generator": nn.Linear(noise, FEATURES),
                "critic": nn.Sequential(nn.Linear(FEATURES, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)),
            }
        )
        generator, critic = models["generator"], models["critic"]
        of_critic = Adam(critic.parameters(), lr=0.02, betas=(0.5, 0.9))
        of_generator = Adam(generator.parameters(), lr=0.2, betas=(0.5, 0.9))
        *_, batches = job.prepare(generator, critic, of_critic, of_generator, loader())
        points = Blobs(SAMPLES).points + 2

        def distance() -> float:
            with torch.no_grad():
                return (fake(generator, points).mean(0) - points.mean(0)).norm().item()

        first = distance()
        for epoch in job.epochs(EPOCHS):
            for number, (batch, _, indices) in enumerate(batches):
                seen.indices[epoch] += indices.tolist()
                critic.requires_grad_(True)
                real, made = batch + 2, fake(generator, batch + 2)
                of_fakes = critic(made.detach() if detach else made)
                job.backward(softplus(-critic(real)).mean() + softplus(of_fakes).mean())
                job.step(of_critic)
                of_generator.zero_grad()
                critic.requires_grad_(not toggle)
                if number % every == 0:
                    job.backward(softplus(-critic(fake(generator, batch + 2))).mean())
                    job.step(of_generator)
                    of_critic.zero_grad()
            critic.requires_grad_(True)
            seen.at_rest(generator, critic)
        return Result(models, distance(), first)

    return script


def test_a_gan(plane: Plane, bound: int) -> None:
    check(plane, gan(), bound)


def test_a_gan_whose_fakes_are_not_detached(plane: Plane, bound: int) -> None:
    check(plane, gan(detach=False), bound)


def test_a_critic_that_is_frozen_while_the_generator_is_trained(plane: Plane, bound: int) -> None:
    check(plane, gan(toggle=True), bound)


@pytest.mark.parametrize("at", RESUMED_AT)
def test_a_critic_that_is_frozen_at_the_rest_over_a_resume(plane: Plane, folder: Path, bound: int, at: int) -> None:
    check_resumed(plane, folder, gan(toggle=True), bound, at)


def test_a_generator_that_is_stepped_every_second_batch(plane: Plane, bound: int) -> None:
    check(plane, gan(every=2), bound)
