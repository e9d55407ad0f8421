"""What a script hands over before its loop: what is trained, on which data, and what is done beside it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from hetsync.balance.profile import RankProfile
from hetsync.data.handed_over import check_test_loader, shuffles, source_of, told_samples
from hetsync.data.loader import Source
from hetsync.data.stream import Stream
from hetsync.emulation.cluster import Cluster
from hetsync.errors import UserError
from hetsync.sync.buffers import Rule, saved_buffers, say
from hetsync.sync.group_state import check_state_dict
from hetsync.sync.milestones import Marks, marks_every
from hetsync.sync.optimizers import check_needs_no_closure
from hetsync.sync.rates import check_scheduler
from hetsync.train.evaluation import Combine, EvaluationLoader, RankParts, check_callable
from hetsync.train.parts import Parts, add
from hetsync.train.prepared import PreparedScaler, PreparedScheduler, TrainingLoader, as_average, unwrapped

if TYPE_CHECKING:  # it loads what only plans need
    from hetsync.plan.assignment import Assignment

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]
Assigns = Callable[[Sequence[RankProfile], Cluster | None], "Assignment"]
EVENTS = ("evaluation", "checkpoint", "round", "end")
MOST_POSITIONS = 2**62  # in a stream


class ScriptLoop(Protocol):
    """What stands for schedulers, scalers and loaders asks the loop that is to come."""

    def batches(self) -> Iterator[Any]:
        """A loop over this rank's batches."""

    def collect(self, optimizer: torch.optim.Optimizer) -> bool:
        """Its gradients are now those of its step; False where none is due."""

    def hand_over(self, optimizer: torch.optim.Optimizer) -> None:
        """What it has collected may be changed by the script now."""

    def settle(self) -> None:
        """Come to rest where the loop has been left."""

    def slices_so_far(self) -> int | None:
        """Batches that have come to this loop, the one that is out among them; None where none is out."""


class Preparation:
    """Attributes:
    parts: Models, optimizers and what belongs to them.
    loader, test_loaders: Batches of the training data, and of each set of test data.
    rank_parts: Which part of test data is whose.
    loss: By which ranks are measured.
    assigns: Tells what a data-parallel plan is for these ranks, once their speeds are known.
    evaluation: After how many samples (None: at the end), what to call, and how its results become one.
    callbacks: By the event's name.
    interval_samples: All ranks rest after so many, again and again.
    first_sample: Where training begins, if no checkpoint tells.
    calls: What is called at rests within the loop, and where these are due beside those that are asked for.
    """

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        self.parts = Parts()
        self.loader: TrainingLoader | None = None
        self.test_loaders: list[EvaluationLoader] = []
        self.rank_parts = RankParts(rank, ranks)
        self.loss: Loss | None = None
        self.assigns: Assigns | None = None
        self.evaluation: tuple[int | None, Callable[[], Any], Combine | None] | None = None
        self.callbacks: dict[str, list[Callable[[Any], None]]] = defaultdict(list)
        self.interval_samples: int | None = None
        self.first_sample = 0
        self.calls: list[tuple[Callable[[], None], Marks]] = []
        self._device = device
        self._total: int | None = None
        self._own_scaler = False  # the loop's, in place of ours

    def scale_losses(self, loop: ScriptLoop) -> None:
        """By a scaler of ours, until one is given."""
        self.parts.scaler = PreparedScaler(torch.amp.GradScaler(self._device.type), loop.collect, loop.hand_over)

    def prepare(self, thing: Any, loop: ScriptLoop) -> Any:
        """See `Job.prepare`."""
        match thing:
            case AveragedModel():
                add(self.parts.averages, thing)
            case torch.nn.Module():
                add(self.parts.models, unwrapped(thing, len(self.rank_parts.shares) > 1))
            case torch.optim.Optimizer():
                check_needs_no_closure(thing, f"optimizer is a {type(thing).__name__}")
                check_state_dict(thing)
                add(self.parts.optimizers, thing)
            case LRScheduler():
                check_scheduler(thing, self.parts.optimizers)
                self.parts.schedulers.append(PreparedScheduler(thing, loop.slices_so_far, loop.settle))
                return self.parts.schedulers[-1]
            case torch.amp.GradScaler():
                if self._own_scaler:
                    raise UserError("job.prepare got two GradScalers: give one, which scales all losses")
                self._own_scaler = True
                self.parts.scaler = PreparedScaler(thing, loop.collect, loop.hand_over)
                return self.parts.scaler
            case DataLoader():
                if not shuffles(thing):
                    return self.test(thing)
                return self.load(loop, None, None, *source_of(thing, None, None, None, None), thing.pin_memory)
            case _:
                raise UserError(
                    f"job.prepare got a {type(thing).__name__}: give models, optimizers, their schedulers, GradScalers"
                    " and DataLoaders (data sets go to job.loader, other state to job.register)"
                )
        return thing

    def keep_average(self, average: Any) -> None:
        """See `Job.keep_average`."""
        add(self.parts.averages, as_average(average))

    def say_of_buffers(self, things: Sequence[Any], said: Mapping[str, Rule]) -> None:
        """See `Job.prepare`."""
        mine = [each for each in things if isinstance(each, torch.nn.Module) and not isinstance(each, AveragedModel)]
        models = [unwrapped(each) for each in mine]
        used: set[str] = set().union(*(say(model, said, "job.prepare(buffers=)") for model in models))
        if unused := said.keys() - used:
            known = [name for model in models for _, _, name, _ in saved_buffers(model)]
            raise UserError(
                f"job.prepare got buffers {', '.join(sorted(unused))}, which the models beside do not have: theirs are"
                f" {', '.join(known[:8]) or 'none'}"
            )

    def load(
        self,
        loop: ScriptLoop,
        samples: int | None,
        epochs: float | None,
        source: Source,
        batch_size: int,
        pin_memory: bool = False,
    ) -> TrainingLoader:
        """Training data; how long to train may be told later."""
        if self.loader is not None:
            raise UserError(
                "the job was given training data twice: give one data set (a ConcatDataset joins several), and test"
                " data that are shuffled to job.test_loader"
            )
        self.loader = TrainingLoader(source, batch_size, loop.batches, pin_memory)
        of_an_epoch = isinstance(source.dataset, Stream)  # are the samples of a stream
        self._total = told_samples(None if of_an_epoch else samples, epochs, source.epoch_samples)
        return self.loader

    def test(self, loader: Any) -> EvaluationLoader:
        """See `Job.test_loader`."""
        if not isinstance(loader, DataLoader):
            raise UserError(f"job.test_loader got a {type(loader).__name__}: give a DataLoader of the test data")
        check_test_loader(loader)
        self.test_loaders.append(EvaluationLoader(loader, self.rank_parts, self._device))
        return self.test_loaders[-1]

    def evaluate_every(self, samples: int | None, function: Callable[[], Any], combine: Combine | None) -> None:
        """See `Job.evaluate_every`."""
        if samples is not None and (not isinstance(samples, int) or samples < 1):
            raise UserError(f"job.evaluate_every got {samples} samples: give a whole number, 1 or more")
        check_callable("job.evaluate_every", function)
        self.evaluation = samples, function, combine

    def call_every(self, samples: int | Marks | None, function: Callable[[], None]) -> None:
        """See `Job.call_every`."""
        if not callable(samples) and samples is not None and (not isinstance(samples, int) or samples < 1):
            raise UserError(f"job.call_every got {samples} samples: give a whole number, 1 or more, or None")
        check_callable("job.call_every", function)
        self.calls.append((function, samples if callable(samples) else marks_every(samples, MOST_POSITIONS)))

    def call(self, event: str, callback: Callable[[Any], None]) -> None:
        """See `Job.on`."""
        if event not in EVENTS:
            raise UserError(f"job.on got {event!r}: use one of {', '.join(EVENTS)}")
        check_callable("job.on", callback, None)
        self.callbacks[event].append(callback)

    def train_on(self, samples: int) -> None:
        """See `Job.train_on`."""
        if self._total is not None:
            raise UserError(
                "the job was told twice how long to train: call job.train_on once, and give job.loader none"
            )
        self._total = told_samples(samples, None, self.training_data.source.epoch_samples)

    def rest_after_epochs(self, count: int) -> int:
        """Train on so many epochs, and rest after each; returns an epoch's samples."""
        if not isinstance(count, int) or count < 1:
            raise UserError(f"job.epochs got {count}: give a whole number of epochs, 1 or more")
        if self._total is not None:
            raise UserError(
                "the job was told twice how long to train: call job.epochs once, with all epochs, and give job.loader"
                " neither epochs nor samples"
            )
        samples = self.training_data.source.epoch_samples
        self._total = count * samples
        self.interval_samples = samples
        return samples

    # Once all is there.

    @property
    def training_data(self) -> TrainingLoader:
        """UserError where there is none."""
        if self.loader is not None:
            return self.loader
        if self.test_loaders:
            raise UserError(
                "the job has test data only, for which job.prepare takes DataLoaders that do not shuffle: give the"
                " training data with shuffle=True, or, in their own order, to job.loader"
            )
        raise UserError("the job has no training data: give a DataLoader to job.prepare, or a data set to job.loader")

    @property
    def told(self) -> int | None:
        """Samples to train on; None where nobody has told: until the script ends."""
        return self._total

    @property
    def total(self) -> int:
        """Whole epochs, and more than anybody trains on, where nobody has told."""
        epoch = self.training_data.source.epoch_samples
        return MOST_POSITIONS // epoch * epoch if self._total is None else self._total

    def rest_after_loops(self) -> None:
        """Where nobody has told how long to train each loop over batches is an epoch, after which all ranks rest."""
        if self._total is None and self.interval_samples is None:
            self.interval_samples = self.training_data.source.epoch_samples
