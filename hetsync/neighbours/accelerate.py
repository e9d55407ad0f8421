"""Accelerate's Accelerator on a HetSync job: a script changes the line that imports it.

    from hetsync.neighbours.accelerate import Accelerator

Started by `torchrun --nproc-per-node N my_script.py` or by `mpirun -np N python my_script.py`. Words and meanings are
Accelerate's: the batch size of a DataLoader is that of one process, so a batch of the job has N times as many samples,
of which each rank computes as many as it is fast. HetSync's rules hold beside them: one loop over the training
DataLoader is an epoch, and at its end all ranks are at rest; there they may gather, evaluate and save.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from hetsync.data.handed_over import shuffles
from hetsync.data.ledger import samples_in
from hetsync.data.stream import is_stream
from hetsync.errors import UserError, complain, early_mistakes
from hetsync.extras import require
from hetsync.files import write_atomically
from hetsync.neighbours.accelerate_state import follow, joined
from hetsync.plane.ending import opening
from hetsync.train.prepared import StandIn, TrainingLoader

try:
    import accelerate
    from accelerate.data_loader import BatchSamplerShard
    from accelerate.utils import concatenate, recursively_apply, send_to_device
except ImportError:
    with early_mistakes():
        require("accelerate", "hetsync.neighbours.accelerate")
    raise

ARGUMENTS = inspect.signature(accelerate.Accelerator.__init__).parameters
STANDING = "hetsync_state.json"  # beside the files of a saved state
REFUSED = {  # arguments for which a model is cut, or computed by others
    "deepspeed_plugin",
    "deepspeed_plugins",
    "fsdp_plugin",
    "megatron_lm_plugin",
    "torch_tp_plugin",
    "parallelism_config",
}


class Accelerator(accelerate.Accelerator):  # type: ignore[misc, unused-ignore]
    """In place of Accelerate's, on the ranks of a launcher's.

    Attributes:
        job: The HetSync job below.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        """Collective. Arguments are Accelerate's; others are those of `hetsync.join`, such as delay_bound=0, and
        `max_steps`: of the optimizer, after which training is over on all ranks, whatever each has counted."""
        with opening():
            own = {name: settings.pop(name) for name in list(settings) if name not in ARGUMENTS}
            self._max_steps: int | None = own.pop("max_steps", None)
            bound = inspect.signature(accelerate.Accelerator.__init__).bind(self, *arguments, **settings).arguments
            check(bound, own)
            plugin = bound.get("gradient_accumulation_plugin")
            steps = bound.get("gradient_accumulation_steps", 1) if plugin is None else plugin.num_steps
            if steps is not None and steps > 1:
                own.setdefault("accumulation", steps)
            self.job = joined(**own)
            super().__init__(*arguments, **settings)
            if self.dataloader_config.dispatch_batches is None:
                self.dataloader_config.dispatch_batches = False
            self.rng_types: list[Any] = []  # ranks draw as the job's seed says
            self._to_save: list[str | None] = []  # once all ranks are at rest
            self._saved: set[str | None] = set()  # so
            self._position = 0  # that a loaded state stands at
            self._trained: list[torch.nn.Module] = []
            self._epochs: Iterator[int] | None = None  # where the job counts them
            self._has_training_data = False
            self._units: Any = None  # over which the next loss is a mean
            self._processes = self.num_processes  # deaths leave fewer
            self.scaler: Any = None if self.scaler is None else self.job.prepare(self.scaler)
            if not self.job.has_begun:
                self.job.call_every(None, self._save_at_rest)

    # What is prepared.

    def prepare(self, *things: Any, device_placement: list[bool] | None = None) -> Any:
        """See Accelerate's. A DataLoader that shuffles is the training data; others are evaluated on."""
        places: Sequence[bool | None] = device_placement or [None] * len(things)
        found: dict[int, Any] = {}
        for number in sorted(range(len(things)), key=lambda number: turn_of(things[number])):
            found[number] = self._prepared(things[number], places[number])
        results = [found[number] for number in range(len(things))]
        return results[0] if len(results) == 1 else tuple(results)

    def _prepared(self, thing: Any, place: bool | None) -> Any:
        match thing:
            case torch.nn.Module():
                return self.prepare_model(thing, device_placement=place)
            case torch.optim.Optimizer():
                return self.prepare_optimizer(thing)
            case DataLoader():
                return self.prepare_data_loader(thing, device_placement=place)
            case LRScheduler():
                return self.prepare_scheduler(thing)
        return thing

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Placed, in mixed precision, compiled, as Accelerate does it; trained by the job where anything requires a
        gradient."""
        prepared: torch.nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        trained = any(weight.requires_grad for weight in prepared.parameters())
        if trained and not evaluation_mode and not any(prepared is known for known in self._trained):
            self._check_first()
            self._trained.append(prepared)
            self.job.prepare(prepared)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        self._check_first()
        self._optimizers.append(optimizer)
        self.job.prepare(optimizer)
        return optimizer

    def prepare_scheduler(self, scheduler: LRScheduler) -> Any:
        """Stepped in the loop it makes as many steps a batch as there are processes, as Accelerate's (one where batches
        are split): one for as many samples as a process's batches have between two steps of the optimizer."""
        prepared = Scheduler(self.job.prepare(scheduler), self._steps_of_a_call)
        self._schedulers.append(prepared)
        return prepared

    def _steps_of_a_call(self) -> int:
        """Of a scheduler's step. In the loop the job makes them, after its samples."""
        alone = self._in_batch or self.split_batches or not self.step_scheduler_with_optimizer
        return 1 if alone else self._processes

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        if is_stream(data_loader.dataset) or not shuffles(data_loader):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        self._check_first()
        own = data_loader.batch_size
        assert own is not None
        place = self.device_placement if device_placement is None else device_placement
        batch = own if self.split_batches else own * self.num_processes
        loader = self.job.loader(data_loader, min(batch, len(data_loader.dataset)))  # type: ignore[arg-type]
        accumulation, every = int(self.job.config.sync.accumulation), loader.source.epoch_samples
        if self.step_scheduler_with_optimizer:
            self.job.step_schedulers_every(own * accumulation)
        if self._max_steps is not None:
            self.job.train_on(samples_in(self._max_steps, loader.batch_size * accumulation, every))
            self._epochs = self.job.intervals(every)
        return self.trained_on(loader, place)

    def trained_on(self, loader: TrainingLoader, place: bool) -> Batches:
        """In place of the training DataLoader, put on the rank's device where it is to `place` them."""
        self._has_training_data = True
        return Batches(loader, self.device if place else None, self._begins_epoch, self.follow_members)

    def _begins_epoch(self) -> bool:
        """A loop over batches is about to begin; False where training is over."""
        return self._epochs is None or next(self._epochs, None) is not None

    def follow_members(self) -> None:
        """Collective, at rest: after deaths the ranks that are left do what all have done."""
        members = self.job.plane.members
        if len(members) == self.num_processes:
            return
        place = members.index(self.job.rank)
        follow(self.job, place)
        for sampler in (loader.batch_sampler for loader in self._dataloaders):
            if isinstance(sampler, BatchSamplerShard):
                sampler.num_processes, sampler.process_index = len(members), place

    def _check_first(self) -> None:
        """UserError where the process has begun to train already."""
        if self.job.has_begun:
            raise UserError(
                "accelerator.prepare got something to train after training had begun, and a process trains once on"
                " HetSync's ranks: prepare all before the first loop, and start the script again for another training"
            )

    # The loop.

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """See `Job.backward`: `weight` is how many tokens (labels, entries) the loss is a mean over, if not one a
        sample. Nothing is divided by the steps of accumulation: the job's mean is that of all their samples."""
        if not self.job.in_batch and not self._has_training_data:
            raise UserError(
                "accelerator.backward was called, and no DataLoader that shuffles was prepared: those that do not are"
                " evaluated on, so make that of the training data with shuffle=True (of a stream:"
                " accelerator.job.loader(dataset, batch_size, samples=N))"
            )
        if self._units is not None:
            options.setdefault("weight", self._units)
        self.job.backward(loss, **options)

    @contextlib.contextmanager
    def weighing(self, units: Any) -> Iterator[None]:
        """A loss within is a mean over so many tokens, labels or entries; None: over the batch's samples."""
        self._units = units
        yield
        self._units = None

    @property
    def sync_gradients(self) -> bool:
        """Does an optimizer step on the batch that is out? True at rest."""
        tasks = None if not self._in_batch else self.job.session.tasks
        return tasks is None or tasks.step_is_due

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        if not value:
            raise UserError("accelerator.sync_gradients was set: give Accelerator gradient_accumulation_steps")

    @property
    def _in_batch(self) -> bool:
        return self.job.in_batch

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """The job knows which batch ends with a step."""
        yield

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Gradients are summed over ranks when the optimizer steps, and not before."""
        yield

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Ranks have unequal batches in any case."""
        yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        return self.job.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """At a delay bound of 0 of the gradients of all ranks; above, of those of the rank's own batch."""
        for optimizer in self._optimizers:
            if not self.job.collect(optimizer):
                return
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        for each in self._optimizers if optimizer is None else [optimizer]:
            if self.scaler is not None:
                self.scaler.unscale_once(each)

    def set_trigger(self) -> None:
        self.flag_tensor: Any = torch.tensor(1)

    def check_trigger(self) -> bool:
        """At rest: has any rank set it since?"""
        self._check_rest("check_trigger", "after the loop over batches")
        told = self.job.gather(self.flag_tensor is not None)
        self.flag_tensor = None
        return any(told)

    # Between ranks: before the loop, and at rest.

    def _check_rest(self, method: str, remedy: str) -> None:
        if self._in_batch:
            raise UserError(
                f"accelerator.{method} was called while a batch is out, and ranks with unequal devices do not come"
                f" there together: call it {remedy}"
            )

    def gather(self, tensor: Any) -> Any:
        """Every rank's, one after the other along the first dimension."""
        self._check_rest(
            "gather",
            "after the loop, of what it has added up; log the rank's own loss, and tell how many tokens it is a mean"
            " over by accelerator.backward(loss, weight=tokens)",
        )
        return send_to_device(concatenate(self._told(recursively_apply(with_a_dimension, tensor))), self.device)

    def _told(self, value: Any) -> list[Any]:
        """By all ranks."""
        members = len(self.job.plane.members)
        told = self.job.gather(value)
        if len(told) < members and self.is_main_process:
            complain("a rank has died while the script gathered, and what it gathers now is without that rank's part")
        return told

    def gather_object(self, value: list[Any]) -> list[Any]:
        self._check_rest("gather_object", "after the loop")
        return [each for part in self._told(value) for each in part]

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """See Accelerate's: without the samples that the last batch has twice."""
        try:
            recursively_apply(lambda tensor: tensor, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        found = self.gather_object(input_data) if use_gather_object else self.gather(input_data)
        left = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else 0
        if left <= 0:
            return found
        return found[:left] if use_gather_object else recursively_apply(lambda tensor: tensor[:left], found)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        if reduction not in ("sum", "mean", "none"):
            raise UserError(f"accelerator.reduce got {reduction!r}: give 'sum', 'mean' or 'none'")
        self._check_rest("reduce", "after the loop, of what it has added up")
        if reduction == "none":
            return tensor
        stacked = self.gather(recursively_apply(lambda each: each[None], tensor))
        divisor = self.num_processes if reduction == "mean" else 1
        return recursively_apply(lambda each: each.sum(0) * (scale / divisor), stacked)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        self._check_rest("pad_across_processes", "after the loop")

        def padded(each: torch.Tensor) -> torch.Tensor:
            if not -each.ndim <= dim < each.ndim:
                return each
            place = dim % each.ndim
            longest = max(shape[place] for shape in self.job.gather(tuple(each.shape)))
            missing = list(each.shape)
            missing[place] = longest - each.shape[place]
            filling = each.new_full(missing, pad_index)
            return torch.cat([filling, each] if pad_first else [each, filling], place)

        return recursively_apply(padded, tensor, error_on_other_type=True)

    # What is saved.

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Any:
        """See Accelerate's. While a batch is out it is done at a rest that comes soon, as ranks hold the same there;
        ranks that come to this call later than others find it done."""
        if not self._in_batch:
            return self._save(output_dir, safe_serialization, **options)
        if output_dir not in self._saved and (output_dir is not None or self.is_main_process):
            self._to_save.append(output_dir)
            self.job.call_soon()
        return output_dir

    def _save_at_rest(self) -> None:
        """What any rank has asked for, and not all have done: where one has died meanwhile all do it once more."""
        self.follow_members()
        told = self._told((self._to_save, self._saved))
        for folder in dict.fromkeys(folder for asked, _ in told for folder in asked):
            if not all(folder in saved for _, saved in told):
                self._save(folder)
                self._saved |= set() if folder is None else {folder}
        self._to_save = []

    def _save(self, folder: str | None, safe: bool = True, **options: Any) -> Any:
        location = super().save_state(folder, safe, **options)
        if self.is_main_process:
            standing = Standing(self.job.samples, self.job.config.run.seed)
            write_atomically(Path(location) / STANDING, json.dumps(standing._asdict()))  # the last: all is there then
        self.wait_for_everyone()
        return location

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Before the loop: training goes on from there, on any number of ranks."""
        super().load_state(input_dir, load_kwargs, **options)
        kept = standing_of(Path(input_dir) if input_dir is not None else self._newest())
        if kept is not None:
            self._position = kept.samples
            self.job.begin_at(self._position)
            torch.manual_seed(kept.seed)  # the order of samples follows from it
        elif self.is_main_process:
            complain(
                f"the state in {input_dir} has no {STANDING}, so it was saved without HetSync, or not to its end:"
                " training begins at the first sample, or where accelerator.skip_first_batches says"
            )

    def _newest(self) -> Path:
        folders = (Path(self.project_dir) / "checkpoints").iterdir()
        return max(folders, key=lambda folder: int(folder.name.rpartition("_")[2]))

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The loop goes on where the state was saved that has been loaded; without one, after so many batches."""
        if not isinstance(dataloader, Batches):
            return super().skip_first_batches(dataloader, num_batches)
        if self._position == 0:
            self._position = num_batches * dataloader.batch_size
            self.job.begin_at(self._position)
        batches = self._position % dataloader.source.epoch_samples // dataloader.batch_size
        if batches < num_batches:
            raise UserError(
                f"accelerator.skip_first_batches got {num_batches}, but the loaded state was saved a moment later, in"
                f" the next epoch (before batch {batches}): go on with the epoch"
                " accelerator.job.samples // len(dataset), or keep the epoch in what register_for_checkpointing gets"
            )
        return dataloader

    def register_for_checkpointing(self, *objects: Any) -> None:
        super().register_for_checkpointing(*objects)
        if self.job.folder is not None:
            for each in objects:
                self.job.register(f"object {len(self._custom_objects)} {type(each).__name__}", each)

    def end_training(self) -> None:
        """Trackers and the job come to their end."""
        super().end_training()
        self.job.close()


class Scheduler(StandIn):
    """In place of a scheduler that the job has prepared."""

    def __init__(self, prepared: Any, steps_of_a_call: Callable[[], int]) -> None:
        self._steps_of_a_call = steps_of_a_call
        super().__init__(prepared)

    def step(self, *arguments: Any, **named: Any) -> None:
        for _ in range(self._steps_of_a_call()):
            self._thing.step(*arguments, **named)


class Batches(StandIn):
    """In place of the training DataLoader: the job's batches, put on the rank's device."""

    def __init__(
        self,
        loader: TrainingLoader,
        device: torch.device | None,
        begins: Callable[[], bool],
        at_end: Callable[[], None],
    ) -> None:
        """`begins` is called before a loop, and tells whether there is anything left; `at_end` when it has come to its
        end."""
        self._device = device
        self._begins = begins
        self._at_end = at_end
        super().__init__(loader)

    def __len__(self) -> int:
        return len(self._thing)

    def __iter__(self) -> Iterator[Any]:
        if not self._begins():
            return
        for batch in self._thing:
            yield batch if self._device is None else send_to_device(batch, self._device)
        self._at_end()


class Standing(NamedTuple):
    """Where a saved state stands."""

    samples: int
    seed: int


def standing_of(folder: Path) -> Standing | None:
    """None where nothing tells. UserError for what is not as it was written."""
    try:
        text = (folder / STANDING).read_text()
    except OSError:
        return None
    try:
        told = json.loads(text)
        return Standing(int(told["samples"]), int(told["seed"]))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / STANDING} is damaged ({error!r}): load another state") from error


def turn_of(thing: Any) -> int:
    """Models are prepared before their optimizers, and these before all else."""
    return 0 if isinstance(thing, torch.nn.Module) else 1 if isinstance(thing, torch.optim.Optimizer) else 2


def with_a_dimension(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.ndim else tensor[None]


def check(arguments: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """UserError for what an Accelerator is given, and HetSync does not do."""
    for name in (name for name in REFUSED if arguments.get(name) is not None):
        raise UserError(f"Accelerator got {name}, but each of HetSync's ranks holds the whole model: leave it out")
    if str(arguments.get("mixed_precision")) == "fp8":
        raise UserError("Accelerator got mixed_precision 'fp8': take 'bf16' or 'fp16'")
    for name in ("precision", "accumulation"):
        if name in own:
            others = {"precision": "mixed_precision", "accumulation": "gradient_accumulation_steps"}
            raise UserError(f"Accelerator got {name}: give {others[name]}, as Accelerate calls it")
