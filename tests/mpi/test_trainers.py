"""Hugging Face's Trainer on a HetSync job: a language model on padded sequences, whole and with adapters of peft.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_trainers.py
"""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training import unequal_shares

from hetsync.data.loader import EpochOrder
from hetsync.errors import UserError
from hetsync.plane.base import Plane

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
from accelerate_jobs import end_job, no_state_left  # noqa: F401 - a fixture
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    TrainerCallback,
    set_seed,
)
from transformers import TrainingArguments as PlainArguments

from hetsync.neighbours.transformers import Trainer, TrainingArguments, check_arguments, settings_of

pytestmark = [pytest.mark.mpi, pytest.mark.each_value, pytest.mark.ranks(1, 2)]

BATCH, SAMPLES, EPOCHS, SEED = 12, 90, 2, 42  # the last is the Trainer's own
STEPS = EPOCHS * 8  # the last batch of an epoch has 6 samples
BOUNDS = pytest.mark.parametrize("bound", [0, 4])


class Sequences(torch.utils.data.Dataset[Any]):
    """Arithmetic ones, of unequal length; each tells its own index."""

    def __init__(self, samples: int = SAMPLES) -> None:
        drawn = random.Random(1)
        self.rows = []
        for _ in range(samples):
            first, step, length = drawn.randint(1, 30), drawn.randint(1, 5), drawn.randint(3, 14)
            self.rows.append([(first + step * place) % 30 + 1 for place in range(length)])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index], "index": index}


def collated(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def collated_with_index(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {**collated(rows), "index": torch.tensor([row["index"] for row in rows])}


def network(adapters: bool = False) -> Any:
    set_seed(3)
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "ffn_dim": 32,
        "word_embed_proj_dim": 16,
        "max_position_embeddings": 16,
    }
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "dropout": 0.0}
    model = OPTForCausalLM(OPTConfig(**sizes, **layers, bos_token_id=0, eos_token_id=0, pad_token_id=0))
    if not adapters:
        return model
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


class Watched(Trainer):  # type: ignore[misc, valid-type]
    """Keeps which samples were computed, with which weights something was evaluated."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.used: list[int] = []
        self.evaluated: list[tuple[int, float]] = []

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        numbers = inputs.pop("index", None)
        if model.training and numbers is not None:
            self.used += numbers.tolist()
        return super().compute_loss(model, inputs, *arguments, **options)

    def evaluate(self, *arguments: Any, **options: Any) -> Any:
        found = super().evaluate(*arguments, **options)
        self.evaluated.append((self.state.global_step, found["eval_loss"]))
        return found


def trainer(
    plane: Plane,
    folder: Path,
    bound: int = 0,
    adapters: bool = False,
    pins: bool = False,
    kind: type[Any] | None = None,
    **options: Any,
) -> Any:
    settings: dict[str, Any] = {"plane": plane, "delay_bound": bound}
    if pins and plane.size > 1:
        settings["pins"] = unequal_shares(plane.size, BATCH)
    more = {name: options.pop(name) for name in ("callbacks", "compute_loss_func") if name in options}
    parts = BATCH // plane.size // options.get("gradient_accumulation_steps", 1)
    options = {
        "per_device_train_batch_size": parts,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": EPOCHS,
        "learning_rate": 0.2,
        "optim": "sgd",
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "remove_unused_columns": False,
    } | options
    return (kind or Watched)(
        model=network(adapters),
        args=TrainingArguments(str(folder), hetsync=settings, **options),
        data_collator=collated_with_index,
        train_dataset=Sequences(),
        eval_dataset=Sequences(21),
        **more,
    )


def plain(adapters: bool = False, steps: int = STEPS, smoothing: float = 0.0) -> Any:
    """One process and nothing but PyTorch: a mean over all the batch's tokens, a rate that falls to 0."""
    model, data, order = network(adapters), Sequences(), EpochOrder(SAMPLES, SEED)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(weights, 0.2)
    for step in range(steps):
        epoch, within = divmod(step, 8)
        span = (epoch * SAMPLES + within * BATCH, epoch * SAMPLES + min((within + 1) * BATCH, SAMPLES))
        batch = collated([data[number] for number in order.indices([span])])
        scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        labels = batch["labels"][:, 1:].flatten()
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels, label_smoothing=smoothing)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 0.2 * (1 - step / STEPS)
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_alike(model: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("named", [True, False])
def test_labels_are_counted_as_the_trainer_counts_them(plane: Plane, folder: Path, named: bool) -> None:
    """It leaves out the first of a sequence where it knows the loss by its name: not that of GPT2LMHeadModel."""
    mine = trainer(plane, folder)
    if not named:
        mine.model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
        mine = type(mine)(model=mine.model, args=mine.args, data_collator=collated, train_dataset=Sequences())
    batch = collated([Sequences()[number] for number in range(BATCH)])
    labels = int(batch["labels"].ne(-100).sum())
    theirs = mine._get_num_items_in_batch([batch], torch.device("cpu"))
    assert int(mine.loss_units(batch)) == int(theirs) == labels - BATCH * named


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("pins", [False, True])
def test_at_bound_0_tokens_count_as_in_one_process(plane: Plane, folder: Path, adapters: bool, pins: bool) -> None:
    mine = trainer(plane, folder, adapters=adapters, pins=pins)
    result = mine.train()
    assert result.global_step == STEPS
    assert_alike(mine.model, plain(adapters))


def test_accumulation_and_smoothing(plane: Plane, folder: Path) -> None:
    mine = trainer(plane, folder, gradient_accumulation_steps=2, label_smoothing_factor=0.1)
    assert mine.train().global_step == STEPS
    assert_alike(mine.model, plain(smoothing=0.1))


@BOUNDS
def test_each_sample_once_an_epoch_and_evaluations_where_steps_say(plane: Plane, folder: Path, bound: int) -> None:
    mine = trainer(plane, folder, bound, eval_strategy="steps", eval_steps=3, logging_steps=2)
    mine.train()
    used = Counter(number for numbers in plane.gather_objects(mine.used) for number in numbers)
    assert used == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))
    assert [step for step, _ in mine.evaluated] == [3, 6, 9, 12, 15, STEPS], (
        "the last, too, as by the Trainer's own rule"
    )
    assert len(set(plane.gather_objects(mine.evaluated[-1]))) == 1
    assert mine.evaluated[-1][1] < mine.evaluated[0][1]
    told = [entry["step"] for entry in mine.state.log_history if "loss" in entry]
    if plane.rank == 0 and bound == 0:
        assert told == list(range(2, STEPS + 1, 2))
    rates = [entry["learning_rate"] for entry in mine.state.log_history if "learning_rate" in entry]
    assert rates == sorted(rates, reverse=True)


def test_evaluations_find_what_one_process_finds(plane: Plane, folder: Path) -> None:
    mine = trainer(plane, folder, eval_strategy="epoch")
    mine.train()
    assert [step for step, _ in mine.evaluated] == [8, 16]
    predictions = mine.predict(Sequences(21))
    assert predictions.predictions.shape[0] == 21


@BOUNDS
def test_a_checkpoint_is_gone_on_with(plane: Plane, folder: Path, bound: int) -> None:
    first = trainer(plane, folder, bound, save_strategy="steps", save_steps=5)
    first.train()
    end_job()
    assert sorted(path.name for path in folder.iterdir()) == [f"checkpoint-{step}" for step in (10, 15, 16, 5)]
    again = trainer(plane, folder, bound)
    assert again.train(resume_from_checkpoint=str(folder / "checkpoint-10")).global_step == STEPS
    used = Counter(number for numbers in plane.gather_objects(again.used) for number in numbers)
    left = EpochOrder(SAMPLES, SEED).indices([(SAMPLES + 2 * BATCH, 2 * SAMPLES)])
    assert used == Counter(left)
    if bound == 0:
        assert_alike(again.model, first.model)


def test_training_may_end_within_an_epoch(plane: Plane, folder: Path) -> None:
    mine = trainer(plane, folder, max_steps=11, lr_scheduler_type="constant")
    assert mine.train().global_step == 11
    assert sum(len(numbers) for numbers in plane.gather_objects(mine.used)) == SAMPLES + 3 * BATCH


@pytest.mark.ranks(2)  # a lone rank may be at its end before it is heard
def test_a_callback_stops_evaluates_and_saves(plane: Plane, folder: Path) -> None:
    class Asks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if plane.rank == 0 and state.global_step == 2:
                control.should_evaluate = control.should_save = True
            if plane.rank == 0 and state.global_step == 9:
                control.should_training_stop = True

    mine = trainer(plane, folder, callbacks=[Asks()])
    result = mine.train()
    assert next(step for step, _ in mine.evaluated) in range(2, 9)
    assert len(list(folder.glob("checkpoint-*"))) == 1
    assert 9 <= result.global_step < STEPS


def test_a_callback_saves_also_where_steps_do(plane: Plane, folder: Path) -> None:
    """By default the Trainer saves each 500 steps; and on one rank only, as by a clock."""

    class Asks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            control.should_save |= plane.rank == 0 and state.global_step == 2

        def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            control.should_save |= plane.rank == 0 and state.global_step == 8

    trainer(plane, folder, callbacks=[Asks()], save_strategy="steps", eval_strategy="no").train()
    saved = sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*"))
    assert saved[-2:] == [8, STEPS]
    if plane.size > 1:  # a lone rank may be at its end before it is heard
        assert 2 <= saved[0] < 8


def test_evaluation_before_training(plane: Plane, folder: Path) -> None:
    mine = trainer(plane, folder)
    first = mine.evaluate()["eval_loss"]
    mine.train()
    assert mine.evaluate()["eval_loss"] < first
    assert_alike(mine.model, plain())


def test_early_stopping_and_the_best_model(plane: Plane, folder: Path) -> None:
    mine = trainer(
        plane,
        folder,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=100.0)],
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
        load_best_model_at_end=True,
    )
    assert mine.train().global_step == 6
    assert [step for step, _ in mine.evaluated] == [3, 6]
    assert mine.evaluate()["eval_loss"] == pytest.approx(min(loss for _, loss in mine.evaluated[:2]), rel=1e-5)


def test_a_callback_stops_after_an_epoch(plane: Plane, folder: Path) -> None:
    class Stops(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            control.should_training_stop = plane.rank == 0

    mine = trainer(plane, folder, callbacks=[Stops()])
    assert mine.train().global_step == 8
    assert sum(len(numbers) for numbers in plane.gather_objects(mine.used)) == SAMPLES
    assert mine.job._is_over(), "the script may end here"


def over_labels(outputs: Any, labels: Any, num_items_in_batch: Any) -> torch.Tensor:
    """As those write it who divide by what the Trainer counts."""
    scores, wanted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(scores, wanted, reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loss_of_the_scripts_own_gets_what_it_divides_by(plane: Plane, folder: Path, accumulation: int) -> None:
    options = {"gradient_accumulation_steps": accumulation, "compute_loss_func": over_labels}
    mine = trainer(plane, folder, pins=accumulation == 1, **options)
    mine.train()
    assert_alike(mine.model, plain())


class OverSequences(Watched):
    """A mean of sequences' means, which counts by samples."""

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        inputs.pop("index", None)
        labels = inputs.pop("labels")
        scores, wanted = model(**inputs).logits[:, :-1].transpose(1, 2), labels[:, 1:]
        each = nn.functional.cross_entropy(scores, wanted, reduction="none").sum(1) / wanted.ne(-100).sum(1)
        return each.mean()

    def loss_units(self, inputs: Any) -> None:
        return None


def test_a_script_says_over_what_its_loss_is_a_mean(plane: Plane, folder: Path) -> None:
    mine = trainer(plane, folder, pins=True, kind=OverSequences, num_train_epochs=1, lr_scheduler_type="constant")
    mine.train()
    model, data, order = network(), Sequences(), EpochOrder(SAMPLES, SEED)
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    for start in range(0, SAMPLES, BATCH):
        batch = collated([data[number] for number in order.indices([(start, min(start + BATCH, SAMPLES))])])
        OverSequences.compute_loss(mine, model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert_alike(mine.model, model)


class Weighted(Watched):
    def _get_train_sampler(self, *arguments: Any) -> Any:
        return torch.utils.data.WeightedRandomSampler([1.0] * 4 + [0.0] * (SAMPLES - 4), SAMPLES)


class OwnLoader(Watched):
    def get_train_dataloader(self) -> Any:
        parts = BATCH // self.job.size
        return torch.utils.data.DataLoader(self.train_dataset, parts, shuffle=True, collate_fn=self.data_collator)


def test_samplers_loaders_and_seeds_of_the_scripts_own_hold(plane: Plane, folder: Path) -> None:
    mine = trainer(plane, folder, kind=Weighted, num_train_epochs=1)
    mine.train()
    used = [number for numbers in plane.gather_objects(mine.used) for number in numbers]
    assert len(used) == SAMPLES
    assert set(used) == {0, 1, 2, 3}
    end_job()
    mine = trainer(plane, folder, kind=OwnLoader)
    assert mine.train().global_step == STEPS
    assert_alike(mine.model, plain())
    end_job()
    mine = trainer(plane, folder, data_seed=7, max_steps=1)
    mine.train()
    used = [number for numbers in plane.gather_objects(mine.used) for number in numbers]
    assert Counter(used) == Counter(EpochOrder(SAMPLES, 7).indices([(0, BATCH)]))


def test_settings_may_be_json(plane: Plane, folder: Path) -> None:
    class Told:
        hetsync, data_seed, gradient_accumulation_steps = '{"delay_bound": 4}', None, 2

    assert settings_of(Told) == {"accumulation": 2, "delay_bound": 4}
    for wrong in ("delay_bound=4", "[4]", "4"):
        Told.hetsync = wrong
        with pytest.raises(UserError, match="give a dictionary, or in JSON"):
            settings_of(Told)


def test_lengths_group_and_streams_end(plane: Plane, folder: Path) -> None:
    grouped = trainer(plane, folder, train_sampling_strategy="group_by_length", num_train_epochs=1)
    assert len(grouped.get_train_dataloader()) == 8
    grouped.train()
    used = Counter(number for numbers in plane.gather_objects(grouped.used) for number in numbers)
    assert used == Counter(range(SAMPLES))
    end_job()

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return (Sequences()[number] for number in range(SAMPLES))

    streamed = trainer(plane, folder)
    streamed.train_dataset = Stream()
    with pytest.raises(UserError, match="give TrainingArguments max_steps"):
        streamed.train()
    streamed.args.max_steps = 5
    assert streamed.train().global_step == 5
    used = Counter(number for numbers in plane.gather_objects(streamed.used) for number in numbers)
    assert used == Counter(range(5 * BATCH))


def test_arguments_are_kept_as_the_class_that_they_are_made_of(plane: Plane, folder: Path) -> None:
    mine = trainer(plane, folder)
    kept = pickle.loads(pickle.dumps(mine.args))
    assert type(kept) is PlainArguments
    assert kept.learning_rate == 0.2


def test_a_second_training_and_plain_arguments_are_one_sentence(plane: Plane, folder: Path) -> None:
    mine = trainer(plane, folder, num_train_epochs=1)
    mine.train()
    with pytest.raises(UserError, match="has trained already"):
        mine.train()
    with pytest.raises(UserError, match=r"TrainingArguments of\s+hetsync"):
        Trainer(model=network(), args=None)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("name", "value"), [("deepspeed", "ds.json"), ("fsdp", "full_shard"), ("auto_find_batch_size", True)]
)
def test_arguments_that_cannot_be_are_one_sentence(name: str, value: Any) -> None:
    class Told:
        pass

    setattr(told := Told(), name, value)
    with pytest.raises(UserError, match=f"got {name}="):
        check_arguments(told)
