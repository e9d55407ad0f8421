"""A recipe's training job: a script on `Job`'s public methods, as anybody could write it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from hetsync import data, models
from hetsync.config.schema import Config
from hetsync.data.evaluation import EVALUATION_BATCH, add_sums, check_evaluation, metrics_of
from hetsync.data.ledger import total_samples
from hetsync.errors import UserError, brief, did_you_mean
from hetsync.profiling.measure import check_compiler
from hetsync.start import loading
from hetsync.sync.optimizers import build_optimizer
from hetsync.train import data_facts
from hetsync.train.best import Patience
from hetsync.train.job import Job
from hetsync.train.resumption import FinishedError
from hetsync.train.run_folder import has_checkpoint

if TYPE_CHECKING:
    from hetsync.plan.assignment import GivenPlan


class Average(AveragedModel):
    """Of weights and statistics. Buffers that have no mean are copied: integers, and infinities (an attention mask's),
    whose difference is nan."""

    @torch.no_grad()
    def update_parameters(self, model: torch.nn.Module) -> None:
        super().update_parameters(model)
        for mine, its in zip(self.module.buffers(), model.buffers(), strict=True):
            mine.copy_(torch.where(mine.isfinite(), mine, its) if mine.is_floating_point() else its)


class Trainer:
    def __init__(self, config: Config, job: Job, plan: GivenPlan | None = None, evaluates: bool = True) -> None:
        """Collective: build, measure, go on from where the run stands. Nothing is written in the run folder but the log
        of a controller. `plan`: a data-parallel one that the recipe names, as which the job has been set up.

        Raises:
            UserError: Something in the recipe cannot work, or does not fit the run that is to be gone on with.
            FinishedError: That run is at its end.
        """
        self.config = config
        self.job = job
        began_with = data_facts.kept(job.folder) if job.folder is not None and has_checkpoint(job.folder) else {}
        self.data = data.build(config.data.name, config.data.options, began_with)
        data.check_batch_size(self.data, config.data.batch_size)
        self.total = total_samples(config.run.samples, config.run.epochs, len(self.data.train))  # type: ignore[arg-type]
        finished = job.finished_at(self.total)
        if finished is not None:
            raise FinishedError(finished)
        config.schedule.check(self.total)
        if config.run.compile:
            check_compiler(job.device)
        self.model = models.build_for(self.data, config.model.name, config.model.options).to(job.device)
        self._going_by_steps = models.going_by_steps(self.model)
        with loading():  # torch's compiler: the first optimizer asks for it
            self.optimizer = build_optimizer(config.optimizer, self.model)
        if plan is not None:
            from hetsync.train.data_parallel import follow  # loads what only plans need

            follow(plan, config, job, self.data, self.model)
        job.prepare(self.model, self.optimizer)
        job.schedule(self.optimizer, partial(config.schedule.factor, total=self.total))
        self.average = self._make_average()
        self.evaluated = self.model if self.average is None else self.average.module
        stop = config.run.early_stop
        self.patience = Patience(stop.metric, stop.mode, stop.patience)
        job.register("early_stop", self.patience)
        self._give_data()
        job.measure(self._loss)
        every = config.run.evaluate_every
        self._rests = config.rests_to_evaluate
        if self._rests:
            self.intervals = job.intervals(every or self.total)
        elif evaluates:
            job.evaluate_every(every, self._score, self._metrics)
        job.ready()
        if config.run.compile:
            self.model.compile()
        check_metrics(config, check_evaluation(self.evaluated, self.data))

    def _make_average(self) -> Average | None:
        decay = self.config.ema.decay
        if decay is None:
            return None
        average = Average(self.model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
        self.job.prepare(average)
        return average

    def _give_data(self) -> None:
        source, job, config = self.data, self.job, self.config.data
        self.batches = job.loader(
            source.train,
            config.batch_size,
            samples=self.total,
            collate_fn=source.collate,
            workers=config.workers,
            costs=source.costs,
        )
        collate = source.test_collate or source.collate
        self.test_batches = job.test_loader(DataLoader(source.evaluated, EVALUATION_BATCH, collate_fn=collate))

    def _loss(self, model: Any, batch: Any) -> Any:
        with self.job.autocast():
            return self.data.loss(model, batch)

    def _score(self) -> dict[str, float]:
        """Sums of metrics over this rank's part of the test data."""
        sums: dict[str, float] = {}
        for batch in self.test_batches:
            with self.job.autocast():
                found = self.data.metrics(self.evaluated, batch)
            add_sums(sums, found)
        return sums

    def _metrics(self, parts: list[dict[str, float]]) -> dict[str, float]:
        return metrics_of(self.data, parts, len(self.data.evaluated))  # type: ignore[arg-type]

    def train(self) -> None:
        """With an evaluation at the end of each interval, where all ranks rest for them."""
        if self._rests:
            for _ in self.intervals:
                self._train()
                self._judge(self.job.evaluate(self._score, combine=self._metrics))
        else:
            self._train()
        if self.data.validation is not None:
            self.job.print(
                f"evaluations were of the validation part: hetsync test {self.job.folder} tells of the test part"
            )

    def _train(self) -> None:
        for batch in self.batches:
            self.step(batch)

    def step(self, batch: Any) -> None:
        """All that depends on the data is in these lines; what happens beside them is the job's."""
        job, clip = self.job, self.config.optimizer.max_grad_norm
        for part in self._going_by_steps:
            part.step_count = job.step_count
        job.backward(self._loss(self.model, batch))
        if clip is not None:
            job.clip_grad_norm_(self.model.parameters(), clip)
        if job.step(self.optimizer) and self.average is not None:
            self.average.update_parameters(self.model)

    def _judge(self, metrics: Mapping[str, float]) -> None:
        best, stop = self.config.run.keep_best, self.config.run.early_stop
        if best.metric is not None:
            self.job.keep_best(metrics[best.metric], best.mode, self.evaluated)
        if stop.metric is not None and self.patience.ends_with(metrics[stop.metric]):
            self.job.print(f"{stop.metric} has not got better for {stop.patience} evaluations: training ends")
            self.job.stop()


def check_metrics(config: Config, metrics: Mapping[str, float]) -> None:
    """UserError for the name of a metric that evaluations do not give."""
    for section in ("keep_best", "early_stop"):
        name = getattr(config.run, section).metric
        if name is not None and name not in metrics:
            known = f"use one of {', '.join(metrics)}" if metrics else "there are no test samples"
            near = did_you_mean(name, metrics)
            raise UserError(f"run.{section}.metric is {brief(name)}, which evaluations do not give{near}: {known}")
