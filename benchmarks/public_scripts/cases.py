"""Which public scripts, at which commit, on what data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.public_scripts import digits

ACCELERATE = "huggingface/accelerate", "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83"
EXAMPLES = "pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"
PEFT = "huggingface/peft", "5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40"

# Accelerate's scheduler makes a step for each process and batch, so a warm-up in steps is N times as long.
MRPC = {
    '"lr": 2e-5': '"lr": 4e-4',
    '"batch_size": 16': '"batch_size": {batch}',
    "num_warmup_steps=100": "num_warmup_steps=20 * {ranks}",
}


@dataclass(frozen=True)
class Case:
    """A public script, and how it is run here.

    Attributes:
        name: Of its edits, too: edits/NAME.ed.
        source: Repository and commit.
        folder: What of it is taken, and within it the `script`.
        door: Which page of the guide it was converted by.
        words: Its command line. `{batch}` is a process's batch: the job's divided by its ranks where `per_rank`.
        batch: The job's.
        metric: What it prints of its held-out data, the last of which counts: a regular expression with one group.
        falls: Whether a lower metric is better.
        values: What stands in both scripts in place of a text that no option changes. `{batch}`, and `{ranks}`: the
            processes.
        material: Makes its data, below the folder it is started in.
        around: What stands in for the network and for hardware, in the script as it stands as in the converted one.
        dtype: Torch's default in all its runs. In float64 what differs is no rounding, which some scripts magnify.
        tolerance: Of the largest difference of weights at D = 0, or None where the script draws random numbers for a
            batch, which no other process can draw.
    """

    name: str
    source: tuple[str, str]
    folder: str
    script: str
    door: str
    words: str
    batch: int
    metric: str
    falls: bool
    values: dict[str, str] = field(default_factory=dict)
    material: Callable[[Path], None] | None = None
    around: str | None = None
    per_rank: bool = False
    dtype: str = "float64"
    tolerance: float | None = 1e-6
    settings: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case(
        name="mnist",
        source=EXAMPLES,
        folder="mnist",
        script="main.py",
        door="own loop",
        words="--epochs 3 --batch-size {batch} --log-interval 1000",
        batch=32,
        metric=r"Test set: Average loss: ([\d.]+)",
        falls=True,
        material=digits.as_mnist,
    ),
    Case(
        name="accelerate_nlp",
        source=ACCELERATE,
        folder="examples",
        script="nlp_example.py",
        door="Accelerate",
        words="--cpu",
        batch=12,
        metric=r"epoch \d: \{'accuracy': ([\d.]+)",
        falls=False,
        values=MRPC,
        around="texts.in_place_of_glue",
        per_rank=True,
    ),
    Case(
        name="peft_frod",
        source=PEFT,
        folder="examples/frod_finetuning",
        script="frod_text_classification.py",
        door="Trainer",
        words="--num_train_epochs 5 --per_device_train_batch_size {batch}",
        batch=12,
        metric=r"'eval_accuracy': '?([\d.]+)",
        falls=False,
        around="texts.in_place_of_glue_and_frozen",
        per_rank=True,
    ),
    Case(
        name="peft_olora",
        source=PEFT,
        folder="examples/olora_finetuning",
        script="olora_finetuning.py",
        door="Trainer",
        words="--seed 0 --batch_size {batch} --num_epochs 3 --val_set_size 240 --eval_step 40 --save_step 40 "
        "--learning_rate 1e-2 --cutoff_len 64 --lora_target_modules all-linear --device_map cpu "
        "--init_lora_weights gaussian",
        batch=12,
        metric=r"'eval_loss': '?([\d.]+)",
        falls=True,
        values={"warmup_steps=100": "warmup_steps=20"},
        around="texts.in_place_of_alpaca",
        per_rank=True,
    ),
    Case(
        name="accelerate_accumulation",
        source=ACCELERATE,
        folder="examples/by_feature",
        script="gradient_accumulation.py",
        door="Accelerate",
        words="--cpu --gradient_accumulation_steps 2",
        batch=12,
        metric=r"epoch \d: \{'accuracy': ([\d.]+)",
        falls=False,
        values=MRPC,
        around="texts.in_place_of_glue",
        per_rank=True,
    ),
    Case(
        name="accelerate_checkpointing",
        source=ACCELERATE,
        folder="examples/by_feature",
        script="checkpointing.py",
        door="Accelerate",
        words="--cpu --checkpointing_steps 50",
        batch=12,
        metric=r"epoch \d: \{'accuracy': ([\d.]+)",
        falls=False,
        values=MRPC,
        around="texts.in_place_of_glue",
        per_rank=True,
    ),
)
