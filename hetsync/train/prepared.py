"""What stands for schedulers, scalers, loaders, and averages that are no modules. Models and optimizers stay what they
are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler, WeightedRandomSampler, default_collate

from hetsync.data.handed_over import InPlaceOfLoader
from hetsync.data.loader import Source
from hetsync.errors import UserError
from hetsync.sync.rates import SchedulerRates


class StandIn:
    """In place of a thing of the script's: what is none of its own, a script reads from that thing, and sets there."""

    def __init__(self, thing: Any) -> None:
        """To be called last: what is set before is its own."""
        self._thing = thing

    def __getattr__(self, name: str) -> Any:
        if "_thing" not in self.__dict__:  # it is being copied
            raise AttributeError(name)
        return getattr(self._thing, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_thing" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            self._check_set(name)
            setattr(self._thing, name, value)

    def _check_set(self, name: str) -> None:
        """UserError where a script may not set it now."""


class PreparedScheduler(StandIn):
    """A torch scheduler whose steps follow the samples of the whole job (`SchedulerRates`)."""

    def __init__(
        self, scheduler: LRScheduler, slices: Callable[[], int | None], settle: Callable[[], None] = lambda: None
    ) -> None:
        """`slices`: how many have come to this loop over batches, the one that is out among them; None: none is out.
        `settle` comes to rest where the loop has been left."""
        self.scheduler = scheduler
        self.rates: SchedulerRates | None = None
        self._slices = slices
        self._settle = settle
        super().__init__(scheduler)

    def step(self, *arguments: Any, **named: Any) -> None:
        slices = self._slices()
        if slices is None:  # at rest, on all ranks alike
            self._settle()
            self.scheduler.step(*arguments, **named)
        else:
            assert self.rates is not None
            self.rates.stepped_in_loop(self.scheduler, slices)
            if arguments or named:
                raise UserError(
                    "a scheduler was stepped in the loop with an argument, but its steps there follow samples: step it"
                    " without (a CosineAnnealingWarmRestarts with T_0 in batches), or after the loop over batches"
                )

    def _check_set(self, name: str) -> None:
        if self._slices() is not None:
            raise UserError(
                f"a scheduler's {name} was set in the loop, where its steps follow the samples of all ranks: set it"
                " before the loop over batches or after it, or within the step of a scheduler of your own, prepared"
            )
        self._settle()


class PreparedScaler(StandIn):
    """A `GradScaler` that looks for infinities in gradients that are summed already, so that all ranks skip alike."""

    def __init__(
        self,
        scaler: torch.amp.GradScaler,
        collect: Callable[[torch.optim.Optimizer], bool],
        hand_over: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None,
    ) -> None:
        """`collect` makes an optimizer's gradients those of its step; False where none is due. `hand_over` is told that
        the script has got them unscaled."""
        self.scaler = scaler
        self._collect = collect
        self._hand_over = hand_over
        # Since the last update:
        self._scaled: Any = None  # the newest outputs
        self._unscaled: list[torch.optim.Optimizer] = []  # whose gradients are
        self._stepped: list[torch.optim.Optimizer] = []
        self._stepping = False
        super().__init__(scaler)

    def scale(self, outputs: Any) -> Any:
        self._scaled = self.scaler.scale(outputs)
        return self._scaled

    def has_made(self, loss: Any) -> bool:
        return self.scaler.is_enabled() and loss is self._scaled

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if self._is_due(optimizer):
            self.scaler.unscale_(optimizer)
            self._unscaled.append(optimizer)
            self._hand_over(optimizer)

    def unscale_once(self, optimizer: torch.optim.Optimizer) -> None:
        """Where nobody has done it yet."""
        if optimizer not in self._unscaled:
            self.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._is_due(optimizer):
            self._stepped.append(optimizer)
            self._stepping = True
            self.scaler.step(optimizer)
            self._stepping = False

    def _is_due(self, optimizer: torch.optim.Optimizer) -> bool:
        if self.scaler.is_enabled() and self._scaled is None:
            raise UserError(
                "the gradients are not scaled, and the step is by a GradScaler: call job.backward(loss), or"
                " scaler.scale(loss).backward(), in place of loss.backward()"
            )
        if optimizer in self._stepped:
            raise UserError(
                "an optimizer was stepped twice on scaled gradients, whose scale is found anew once a batch: step it"
                " once a batch"
            )
        return self._collect(optimizer) and _has_gradients(optimizer)

    def make_up(self, optimizers: Iterable[torch.optim.Optimizer], clip: Callable[[], None]) -> None:
        """Their steps on gradients that are summed, where the loop has scaled no loss of the batch, as others' have."""
        due = [optimizer for optimizer in optimizers if _has_gradients(optimizer)]
        for optimizer in due:
            self.scaler.scale(torch.zeros((), device=optimizer.param_groups[0]["params"][0].device))  # it has a device
            self.scaler.unscale_(optimizer)
        clip()
        self._stepping = True
        for optimizer in due:
            self.scaler.step(optimizer)
        for optimizer in due:
            optimizer.zero_grad(set_to_none=True)
        self._stepping = False
        if due:
            self.scaler.update()

    def begin_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer steps. Where the loop has called it without the scaler its gradients are unscaled; returns
        whether they may hold infinities, which nobody has looked for."""
        if self._stepping or not self.scaler.is_enabled() or not self._is_due(optimizer):
            return False
        self.unscale_once(optimizer)
        self._stepped.append(optimizer)
        return True

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        if self._unscaled or self._stepped or new_scale is not None:
            self.scaler.update(new_scale)
            self._scale_again([each for each in self._unscaled if each not in self._stepped])
            self._scaled, self._unscaled, self._stepped = None, [], []

    @torch.no_grad()
    def _scale_again(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """A loop that adds gradients up over batches, and has clipped them, adds scaled ones to them."""
        for weight in (weight for each in optimizers for group in each.param_groups for weight in group["params"]):
            if weight.grad is not None:
                weight.grad.mul_(self.scaler.get_scale())

    def give_up(self, state: Mapping[str, Any] | None) -> None:
        """The batch's steps do not count: the scale is what it was (`state`; None: as it is), and nothing is unscaled
        or stepped."""
        if not self.scaler.is_enabled():
            return
        before = self.scaler.state_dict() if state is None else dict(state)
        if self._unscaled or self._stepped:
            self.scaler.update()  # which forgets what it has found of them
        self.scaler.load_state_dict(before)
        self._unscaled, self._stepped = [], []


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """None, where no rank has had anything to learn: torch's scaler would fail."""
    return any(weight.grad is not None for group in optimizer.param_groups for weight in group["params"])


class OwnAverage(torch.nn.Module):
    """Tensors that a script averages by itself, in a list or dictionary of its own, as buffers. The script may put
    others in their places."""

    def __init__(self, tensors: Sequence[torch.Tensor] | Mapping[Any, torch.Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    @property
    def _buffers(self) -> dict[str, torch.Tensor | None]:
        tensors: Any = self.tensors
        named = tensors.items() if isinstance(tensors, Mapping) else enumerate(tensors)
        return {str(name).replace(".", "/"): tensor for name, tensor in named}

    @_buffers.setter
    def _buffers(self, made: dict[str, torch.Tensor | None]) -> None:
        """The module's own are none."""


def as_average(thing: Any) -> torch.nn.Module:
    """A module, or one that holds tensors. UserError for anything else."""
    if isinstance(thing, torch.nn.Module):
        return thing
    tensors = list(thing.values() if isinstance(thing, Mapping) else thing) if isinstance(thing, Collection) else []
    if not tensors or not all(isinstance(each, torch.Tensor) for each in tensors):
        raise UserError(
            f"job.keep_average got a {type(thing).__name__}: give a module (a copy of the model), or a list or"
            " dictionary of tensors, once all are in it"
        )
    return OwnAverage(thing)


class TrainingLoader(InPlaceOfLoader):
    """This rank's batches of the job's one stream of samples: in place of a `DataLoader` of training data.

    Its length is that of a loop on one device: batches of B samples in an epoch.
    """

    def __init__(
        self, source: Source, batch_size: int, batches: Callable[[], Iterator[Any]], pin_memory: bool = False
    ) -> None:
        self.source = source
        self.batch_size = batch_size
        self.collate_fn = source.collate or default_collate
        self.num_workers = source.workers
        self.drop_last = source.used is not None
        self.pin_memory = pin_memory
        self._batches = batches

    @property
    def dataset(self) -> Any:
        return self.source.dataset

    @property
    def shuffle(self) -> bool:
        return self.source.shuffle

    @property
    def sampler(self) -> Sampler[int]:
        weights = self.source.weights
        return super().sampler if weights is None else WeightedRandomSampler(weights, len(weights))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return -(-self.source.epoch_samples // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        return self._batches()


def unwrapped(model: torch.nn.Module, several: bool = False) -> torch.nn.Module:
    """The module inside one that torch.compile has made. UserError for one that shares gradients by itself, or that
    cannot be shared as it is by `several` ranks."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        raise UserError(
            f"model is a {type(model).__name__}, which shares gradients by itself: give the module inside"
            " (model.module)"
        )
    inner = getattr(model, "_orig_mod", model)
    assert isinstance(inner, torch.nn.Module)
    for name, module in inner.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise UserError(
                f"{name or 'model'} is a SyncBatchNorm, but a rank normalises by its own batches: leave"
                " convert_sync_batchnorm out (BatchNorm as it is), or use GroupNorm, which needs no batch"
            )
        if several and getattr(module, "max_norm", None) is not None:
            raise UserError(
                f"{name or 'model'} has max_norm, by which forward shortens the rows that a rank's own batch names:"
                " leave it out, and shorten what the layer returns, or all rows on all ranks between epochs"
            )
    for name, tensor in (*inner.named_parameters(), *inner.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise UserError(
                f"{name} has no shape yet, as its layer is lazy: call the model on one batch before the optimizer is"
                " made"
            )
    return inner
