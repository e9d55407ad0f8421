"""Hugging Face's Trainer on a HetSync job: a script changes the line that imports it.

    from hetsync.neighbours.transformers import Trainer, TrainingArguments

    arguments = TrainingArguments("runs/mine", hetsync={"delay_bound": 4})

Trainers and arguments that are made of these (trl's) become HetSync's by `trainer_of` and `arguments_of`. Started by
`torchrun --nproc-per-node N my_script.py` or by `mpirun -np N python my_script.py`. The batch size is per process, as
the Trainer's. Loop and order of samples are HetSync's; evaluations, checkpoints and callbacks are the Trainer's, with
all ranks at rest.
"""

from __future__ import annotations

import contextlib
import copyreg
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.utils.data import DataLoader

from hetsync.data.ledger import batches_in, samples_in
from hetsync.data.stream import is_stream
from hetsync.errors import UserError, early_mistakes
from hetsync.extras import require
from hetsync.neighbours.accelerate import Accelerator, Batches, with_a_dimension
from hetsync.neighbours.accelerate_state import joined
from hetsync.plane.ending import opening
from hetsync.train.job import Job

try:
    import transformers
    from accelerate.state import PartialState
    from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, recursively_apply
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer_pt_utils import LengthGroupedSampler
    from transformers.trainer_utils import IntervalStrategy
    from transformers.training_args import ParallelMode
except ImportError:
    with early_mistakes():
        require("transformers", "hetsync.neighbours.transformers")
    raise

NOT_TOLD = {"hetsync", "distributed_state", "_setup_devices", "_n_gpu"}  # of arguments, where they are pickled
REFUSED = {  # arguments, what they may be, and what to do
    "deepspeed": (None, "each of HetSync's ranks holds the whole model: leave it out"),
    "fsdp": (None, "each of HetSync's ranks holds the whole model: leave it out"),
    "auto_find_batch_size": (False, "HetSync finds what a rank's memory takes by itself: leave it out"),
    "include_num_input_tokens_seen": ("no", "ranks do not count together at each step: leave it out"),
}


def arguments_of(base: type[Any]) -> type[Any]:
    """A class of TrainingArguments, on a HetSync job: with `hetsync`, a dictionary of arguments of `hetsync.join`."""

    @dataclass
    class Arguments(base):
        hetsync: dict | str | None = field(
            default=None, metadata={"help": 'Arguments of hetsync.join, in JSON, such as {"delay_bound": 4}.'}
        )

        @cached_property
        def _setup_devices(self) -> torch.device:
            with opening():
                check_arguments(self)
                job = joined(**settings_of(self))
            self.distributed_state = PartialState()
            self._n_gpu = int(job.device.type == "cuda")
            return job.device

        @property
        def parallel_mode(self) -> ParallelMode:
            """The Trainer wraps no model, and calls nobody by itself."""
            return ParallelMode.NOT_PARALLEL

        @contextlib.contextmanager
        def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
            state = PartialState()
            with state.local_main_process_first() if local else state.main_process_first():
                yield

        def __reduce_ex__(self, protocol: Any) -> Any:
            """As the class that it is made of: who loads them needs no HetSync."""
            told = {name: value for name, value in vars(self).items() if name not in NOT_TOLD}
            return copyreg._reconstructor, (base, object, None), told  # type: ignore[attr-defined]

    Arguments.__name__, Arguments.__qualname__ = base.__name__, base.__qualname__
    return Arguments


def settings_of(arguments: Any) -> dict[str, Any]:
    """Those of the job."""
    told = arguments.hetsync or {}
    if isinstance(told, str):
        with contextlib.suppress(json.JSONDecodeError):
            told = json.loads(told)
    if not isinstance(told, dict):
        raise UserError(f'TrainingArguments got hetsync={told!r}: give a dictionary, or in JSON {{"delay_bound": 4}}')
    seed = {} if arguments.data_seed is None else {"seed": arguments.data_seed}
    return {"accumulation": arguments.gradient_accumulation_steps, **seed, **told}


def check_arguments(arguments: Any) -> None:
    """UserError for what a Trainer is told, and HetSync does not do."""
    for name, (wanted, remedy) in REFUSED.items():
        found = getattr(arguments, name, wanted)
        if found not in (wanted, "", [], {}):
            raise UserError(f"TrainingArguments got {name}={found!r}: {remedy}")


class TrainersAccelerator(Accelerator):
    """What a Trainer gathers while a batch is out it does for its logs (trl's does, at each step): these are of rank 0
    alone then."""

    def gather(self, tensor: Any) -> Any:
        return recursively_apply(with_a_dimension, tensor) if self.job.in_batch else super().gather(tensor)

    def gather_object(self, value: list[Any]) -> list[Any]:
        return value if self.job.in_batch else super().gather_object(value)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        return tensor if self.job.in_batch else super().reduce(tensor, reduction, scale)


class OnHetSync:
    """What is another in a Trainer on a HetSync job."""

    args: Any
    accelerator: Accelerator
    control: Any
    state: Any

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        given = settings.get("args", arguments[1] if len(arguments) > 1 else None)
        if not hasattr(given, "hetsync"):
            raise UserError(
                f"{type(self).__name__} got {type(given).__name__} as args: give it TrainingArguments of"
                " hetsync.neighbours.transformers (arguments_of makes them of trl's and others' own)"
            )
        super().__init__(*arguments, **settings)
        self.args.average_tokens_across_devices = False  # the job does, by what `loss_units` tells
        self._wanted: set[str] = set()  # by callbacks, at a rest that comes soon
        self._rested: tuple[int, frozenset[str]] = -1, frozenset()  # at which step last, and what was wanted there
        self._losses: list[torch.Tensor] = []  # of this rank's batches, since the last log
        self._epochs: Iterator[int] = iter(())
        self._evaluates: Callable[..., None] = lambda: None
        self._loader: Any = None
        self._batches: Any = None

    @property
    def job(self) -> Job:
        return self.accelerator.job

    def create_accelerator_and_postprocess(self) -> None:
        config = self.args.accelerator_config.to_dict()
        names = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking")
        told = self._build_accelerator_args(  # type: ignore[attr-defined]
            dataloader_config=DataLoaderConfiguration(**{name: config[name] for name in names}),
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        )
        self.accelerator = TrainersAccelerator(**told)
        self.gather_function = self.accelerator.gather_for_metrics
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False

    # What is trained on.

    @property
    def _step_samples(self) -> int:
        return int(self._loader.batch_size * self.args.gradient_accumulation_steps)

    def _steps_at(self, samples: int) -> int:
        """Of the optimizer, when the job has trained on so many samples."""
        return batches_in(samples, self._step_samples, self._loader.source.epoch_samples)

    def _samples_at(self, steps: int) -> int:
        return samples_in(steps, self._step_samples, self._loader.source.epoch_samples)

    def get_train_dataloader(self) -> Any:
        """The job's batches, the same whenever they are asked for."""
        return self._load(self._own_data()) if self._loader is None else self._batches

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        if self._loader is None:  # a class of the script's has made it
            own = dataloader.batch_size or args.train_batch_size
            self._load({"data": dataloader, "batch_size": own * self.job.size})
        return super().set_initial_training_values(args, self._batches)  # type: ignore[misc]

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, self._batches, resume_from_checkpoint)  # type: ignore[misc]
        return prepared[0], self._batches

    def _load(self, data: dict[str, Any]) -> Batches:
        """What `data` of `Job.loader` make, up to the last step."""
        args, size = self.args, data["batch_size"] * self.args.gradient_accumulation_steps
        inner: Any = data["data"].dataset if isinstance(data["data"], DataLoader) else data["data"]
        if is_stream(inner):
            if args.max_steps <= 0:
                raise UserError(
                    f"the training data is a {type(inner).__name__}, which has no length, and max_steps is"
                    f" {args.max_steps}: give TrainingArguments max_steps"
                )
            data = {**data, "samples": args.max_steps * size, "epochs": 1}
        else:
            data = {**data, "batch_size": min(data["batch_size"], len(inner))}
        self._loader = self.job.loader(**data)
        if not is_stream(inner):
            per_epoch = -(-self._loader.source.epoch_samples // self._step_samples)
            steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
            self.job.train_on(self._samples_at(steps))
        self.job.step_schedulers_every(self._step_samples)
        self.job.call_every(self._marks, self._at_rest)
        self._epochs = self.job.intervals(self._loader.source.epoch_samples)
        self._batches = self.accelerator.trained_on(self._loader, place=False)
        return self._batches

    def _own_data(self) -> dict[str, Any]:
        """Of the Trainer's data set, in the order of its sampler's kind."""
        dataset, collate = self._without_unused_columns(self.train_dataset)  # type: ignore[attr-defined]
        args, batch = self.args, int(self.args.train_batch_size * self.job.size)
        data = {"data": dataset, "batch_size": batch, "collate_fn": collate, "workers": args.dataloader_num_workers}
        if is_stream(dataset):
            return data
        sampler = self._get_train_sampler(dataset)  # type: ignore[attr-defined]
        if isinstance(sampler, LengthGroupedSampler):
            data["costs"], sampler = sampler.lengths, None
        order = {"shuffle": True} if sampler is None else {"sampler": sampler}
        own = min(batch, len(dataset))
        return {**data, "data": DataLoader(dataset, own, drop_last=args.dataloader_drop_last, **order)}

    def _without_unused_columns(self, dataset: Any) -> tuple[Any, Any]:
        collate = self.data_collator  # type: ignore[attr-defined]
        if hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns"):
            return self._remove_unused_columns(dataset, description="Training"), collate  # type: ignore[attr-defined]
        return dataset, self._get_collator_with_removed_columns(collate, description="Training")  # type: ignore[attr-defined]

    def _marks(self, position: int) -> int | None:
        """Where steps end after which something is evaluated or saved."""
        args = self.args
        step, state = self._steps_at(position) if position >= 0 else -1, self.state
        due = []
        if args.eval_strategy == IntervalStrategy.STEPS:
            due.append((step // state.eval_steps + 1) * state.eval_steps)
        if args.save_strategy == IntervalStrategy.STEPS and state.save_steps > 0:
            due.append((step // state.save_steps + 1) * state.save_steps)
        found = [self._samples_at(steps) for steps in due]
        return min((samples for samples in found if samples > position), default=None)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        scheduler = super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            return scheduler  # which is stepped at rest, with a metric
        self.lr_scheduler = self.job.prepare(scheduler)
        return self.lr_scheduler

    def _init_training_state(self, *arguments: Any, **named: Any) -> Any:
        if self.job.samples:
            raise UserError(f"this {type(self).__name__} has trained already: start another process for the next job")
        found = super()._init_training_state(*arguments, **named)  # type: ignore[misc]
        self.job.begin_at(self._samples_at(self.state.global_step))
        return found

    # The loop.

    def _run_epoch(
        self,
        model: Any,
        epoch: int,
        train_dataloader: Batches,
        trial: Any,
        ignore_keys_for_eval: Any,
        start_time: float,
        **others: Any,
    ) -> None:
        next(self._epochs)
        norm: Any = None

        def evaluates() -> None:
            rate = self._get_learning_rate()  # type: ignore[attr-defined]
            of_all = (self._loss_for_log(), norm, model, trial, epoch, ignore_keys_for_eval, start_time)
            self._maybe_log_save_evaluate(*of_all, learning_rate=rate)  # type: ignore[attr-defined]

        self._evaluates = evaluates
        self.current_gradient_accumulation_steps = 1
        for inputs in train_dataloader:
            norm = self._step(model, inputs)
        self._at_rest()
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)  # type: ignore[attr-defined]
        self._agree_on_control()
        evaluates()
        self._agree_on_control()  # an evaluation may have ended it
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        elif self.control.should_training_stop:
            self.job.stop()

    def _agree_on_control(self) -> None:
        """Collective: what callbacks of some ranks want all ranks do."""
        control = self.control
        told = self.job.gather((control.should_evaluate, control.should_save, control.should_training_stop))
        control.should_evaluate, control.should_save, control.should_training_stop = map(any, zip(*told, strict=True))

    def _step(self, model: Any, inputs: Any) -> Any:
        """On a batch; the norm of gradients, where one was found."""
        args, call = self.args, self.callback_handler  # type: ignore[attr-defined]
        before = self._steps_at(self.job.samples)
        self.control = call.on_step_begin(args, self.state, self.control)
        units = self.loss_units(inputs)
        with self.accelerator.weighing(units):
            loss = self.training_step(model, inputs, units)  # type: ignore[attr-defined]
        if not args.logging_nan_inf_filter or loss.isfinite():
            self._losses.append(loss)
        self.current_flos += float(self.floating_point_ops(inputs))  # type: ignore[attr-defined]
        if not self.accelerator.sync_gradients:
            self.optimizer.step()  # type: ignore[attr-defined]
            self.control = call.on_substep_end(args, self.state, self.control)
            return None
        norm = self._clip_grad_norm(model) if args.max_grad_norm > 0 else None  # type: ignore[attr-defined]
        self.control = call.on_pre_optimizer_step(args, self.state, self.control)
        self.optimizer.step()  # type: ignore[attr-defined]
        self.control = call.on_optimizer_step(args, self.state, self.control)
        if not isinstance(self.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.lr_scheduler.step()
        model.zero_grad()
        self._count(before + 1)
        self.control = call.on_step_end(args, self.state, self.control)
        self._look_at_control()
        self._evaluates()
        return norm

    def _count(self, steps: int) -> None:
        self.state.global_step = steps
        self.state.epoch = steps / -(-self._loader.source.epoch_samples // self._step_samples)

    def loss_units(self, inputs: Any) -> torch.Tensor | float | None:
        """Over how many units the batch's loss is a mean, by which it counts among those of other ranks; the loss gets
        it as num_items_in_batch. By default as many as there are labels that are not left out; None: the samples.
        Override it where a loss of your own is a mean over anything else (the sum of class weights, say)."""
        labels = inputs.get("shift_labels", inputs.get("labels")) if hasattr(inputs, "get") else None
        if not isinstance(labels, torch.Tensor) or type(self._inner_model).__name__.endswith("ForCTC"):
            return None
        if "shift_labels" not in inputs and self._shifts_labels:
            labels = labels[..., 1:]
        return labels.ne(getattr(getattr(self._inner_model, "config", None), "semantic_loss_ignore_index", -100)).sum()

    @cached_property
    def _inner_model(self) -> Any:
        model = self.accelerator.unwrap_model(self.model)  # type: ignore[attr-defined]
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    @cached_property
    def _shifts_labels(self) -> bool:
        """Is the loss over a sequence's labels without the first? Where the Trainer tells the loss how many there are,
        as it counts them: it knows it of losses that it names (not of GPT2LMHeadModel's, whose mean is of more)."""
        if self.model_accepts_loss_kwargs or self.compute_loss_func is not None:  # type: ignore[attr-defined]
            return bool(getattr(self, "_loss_shifts_labels", False))
        return type(self._inner_model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    def _loss_for_log(self) -> torch.Tensor:
        """This rank's mean, for each of the steps since the last log, as the Trainer divides by these."""
        steps = self.state.global_step - self._globalstep_last_logged  # type: ignore[attr-defined]
        if not self._losses:
            return torch.zeros((), device=self.args.device)
        mean = torch.stack(self._losses).mean()
        if self.control.should_log and steps:
            self._losses = []
        self._tr_loss = mean * steps if self._losses else torch.zeros_like(mean)  # for the end of training
        return mean * steps

    def _look_at_control(self) -> None:
        """What callbacks want: logs are written now, all else comes at a rest."""
        args, state, control = self.args, self.state, self.control
        if args.logging_strategy == IntervalStrategy.STEPS:
            last = self._globalstep_last_logged  # type: ignore[attr-defined]
            control.should_log |= state.global_step // state.logging_steps > last // state.logging_steps
        if control.should_epoch_stop:
            raise UserError("a callback set should_epoch_stop, but an epoch uses each sample once: leave it out")
        wanted = {
            "evaluate": control.should_evaluate and not self._evaluates_at(state.global_step),
            "save": control.should_save and not self._saves_at(state.global_step),
            "stop": control.should_training_stop and state.global_step < state.max_steps,
        }
        control.should_evaluate = control.should_save = control.should_training_stop = False
        if any(wanted.values()):
            self._wanted |= {name for name, is_wanted in wanted.items() if is_wanted}
            self.job.call_soon()

    def _evaluates_at(self, step: int) -> bool:
        """By steps; and after the last."""
        args, state = self.args, self.state
        if args.eval_strategy != IntervalStrategy.STEPS or step < args.eval_delay:
            return False
        return bool(step % state.eval_steps == 0 or step >= state.max_steps)

    def _saves_at(self, step: int) -> bool:
        """The same."""
        args, state = self.args, self.state
        if args.save_strategy != IntervalStrategy.STEPS:
            return False
        return bool((state.save_steps > 0 and step % state.save_steps == 0) or step >= state.max_steps)

    def _at_rest(self) -> None:
        """All ranks alike: evaluate, save, and stop, where steps or callbacks have it so. What all have done at a step
        is done; where a rank has died meanwhile all do it once more."""
        state, control, step = self.state, self.control, self._steps_at(self.job.samples)
        told = self.job.gather((self._wanted, self._rested))
        is_new = any(at != step for _, (at, _) in told)
        wanted = set().union(*(mine for mine, _ in told), *(done for _, (at, done) in told if at == step and is_new))
        self.accelerator.follow_members()
        state.is_world_process_zero = self.is_world_process_zero()  # type: ignore[attr-defined]
        state.is_local_process_zero = self.is_local_process_zero()  # type: ignore[attr-defined]
        self._count(step)
        control.should_evaluate = (is_new and self._evaluates_at(step)) or "evaluate" in wanted
        control.should_save = (is_new and self._saves_at(step)) or "save" in wanted
        self._evaluates()
        self._agree_on_control()
        if "stop" in wanted or (is_new and control.should_training_stop):
            control.should_training_stop = True
            if step < state.max_steps:
                self.job.stop()
        control.should_evaluate = control.should_save = False
        self._wanted, self._rested = set(), (step, frozenset(wanted))

    def _save_checkpoint(self, *arguments: Any, **named: Any) -> None:
        super()._save_checkpoint(*arguments, **named)  # type: ignore[misc]
        self.accelerator.wait_for_everyone()


def trainer_of(base: type[Any]) -> type[Any]:
    """A Trainer's class, on a HetSync job."""
    return type(base.__name__, (OnHetSync, base), {"__doc__": base.__doc__})


TrainingArguments = arguments_of(transformers.TrainingArguments)
Trainer = trainer_of(transformers.Trainer)
