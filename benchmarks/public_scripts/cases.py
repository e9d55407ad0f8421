"""Which public scripts, at which commit, on what data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.public_scripts import digits, texts

ACCELERATE = "huggingface/accelerate", "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83"
EXAMPLES = "pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"
PEFT = "huggingface/peft", "5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40"

# Accelerate's scheduler makes a step for each process and batch, so a warm-up in steps is N times as long.
MRPC = {
    '"lr": 2e-5': '"lr": 4e-4',
    '"batch_size": 16': '"batch_size": {batch}',
    "num_warmup_steps=100": "num_warmup_steps=20 * {ranks}",
    '"num_epochs": 3': '"num_epochs": 2',
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
        tolerance: Of the largest difference of weights at D = 0, or None where the script makes something of a batch as
            a whole: random numbers for it, which no other process can draw, or batch norm's statistics.
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


def of_examples(name: str, **told: Any) -> Case:
    """A script of pytorch/examples, in the folder of its name."""
    return Case(
        name=name,
        source=EXAMPLES,
        folder=name,
        script="main.py",
        door="own loop",
        batch=32,
        falls=True,
        **told,
    )


def of_accelerate(**told: Any) -> Case:
    """One of Accelerate's examples on MRPC."""
    return Case(
        source=ACCELERATE,
        door="Accelerate",
        batch=12,
        metric=r"epoch \d: \{'accuracy': ([\d.]+)",
        falls=False,
        values=MRPC,
        around="sentences.in_place_of_glue",
        per_rank=True,
        **told,
    )


CASES = (
    of_examples(
        name="mnist",
        words="--epochs 3 --batch-size {batch} --log-interval 1000",
        metric=r"Test set: Average loss: ([\d.]+)",
        material=digits.as_mnist,
    ),
    of_accelerate(
        name="accelerate_nlp",
        folder="examples",
        script="nlp_example.py",
        words="--cpu",
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
        around="sentences.in_place_of_glue_and_frozen",
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
        around="sentences.in_place_of_alpaca",
        per_rank=True,
    ),
    of_accelerate(
        name="accelerate_accumulation",
        folder="examples/by_feature",
        script="gradient_accumulation.py",
        words="--cpu --gradient_accumulation_steps 2",
    ),
    of_accelerate(
        name="accelerate_checkpointing",
        folder="examples/by_feature",
        script="checkpointing.py",
        words="--cpu --checkpointing_steps 50",
    ),
    Case(
        name="nanogpt",
        source=("karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"),
        folder=".",
        script="train.py",
        door="own loop",
        words="--dataset=guide --device=cpu --dtype=float32 --compile=False --block_size=32 --n_layer=2 --n_head=2 "
        "--n_embd=32 --batch_size={batch} --gradient_accumulation_steps=2 --learning_rate=1e-3 --beta2=0.99 "
        "--warmup_iters=20 --max_iters=300 --lr_decay_iters=300 --min_lr=1e-4 --eval_interval=150 --eval_iters=20",
        batch=32,
        metric=r"val loss ([\d.]+)",
        falls=True,
        material=texts.as_nanogpt,
        around="texts.blocks_in_the_jobs_order",
    ),
    of_examples(
        name="mnist_rnn",
        words="--epochs 4 --batch-size {batch} --log-interval 1000",
        metric=r"Test set: Average loss: ([\d.]+)",
        material=digits.as_mnist,
        tolerance=None,  # batch norm sees a rank's slice
    ),
    of_examples(
        name="vae",
        words="--epochs 4 --batch-size {batch} --log-interval 1000",
        metric=r"Test set loss: ([\d.]+)",
        material=digits.as_mnist,
        around="noise.of_a_vae",
    ),
    Case(
        name="classification",
        source=("pytorch/vision", "904dad4453826a7fc2ec47f033850b985f408fa5"),
        folder="references/classification",
        script="train.py",
        door="own loop",
        words="--data-path digits --model squeezenet1_1 --device cpu -j 0 -b {batch} --epochs 4 --opt adamw --lr 2e-4 "
        "--lr-scheduler cosineannealinglr --train-crop-size 32 --val-resize-size 32 --val-crop-size 32 "
        "--clip-grad-norm 10 --model-ema --model-ema-steps 1 --model-ema-decay 0.9 --print-freq 1000",
        batch=32,
        metric=r"Test:  Acc@1 ([\d.]+)",
        falls=False,
        material=digits.as_image_folder,
        around="digits.augmented_by_sample",
    ),
    of_examples(
        name="dcgan",
        words="--dataset mnist --dataroot ../data --workers 0 --batchSize {batch} --niter 2 --manualSeed 1 "
        "--nz 16 --ngf 4 --ndf 4",
        metric=r"Loss_D: ([\d.]+)",  # of the last batch that was printed: the script looks at no held-out data
        material=digits.as_mnist,
        around="noise.of_a_gan",
    ),
    of_examples(
        name="word_language_model",
        words="--data text --model Transformer --use-optimizer --lr 3e-3 --clip 1 --epochs 4 --batch_size {batch} "
        "--emsize 32 --nhid 32 --nlayers 1 --dropout 0",
        metric=r"test ppl +([\d.]+)",
        material=texts.as_words,
    ),
    Case(
        name="diffusion",
        source=("huggingface/diffusers", "58eb52c0803ea9af3abec60841c2a093bdf1f951"),
        folder="examples/unconditional_image_generation",
        script="train_unconditional.py",
        door="Accelerate",
        words="--train_data_dir digits/train --model_config_name_or_path unet --resolution 16 --num_epochs 2 "
        "--train_batch_size {batch} --learning_rate 1e-3 --lr_scheduler constant --use_ema --checkpointing_steps 20 "
        "--eval_batch_size 1 --ddpm_num_steps 100 --ddpm_num_inference_steps 2 --save_images_epochs 1000",
        batch=24,
        metric=r"loss=([\d.]+)",  # of the last batch: the script looks at no held-out data
        falls=True,
        material=digits.as_pictures_for_diffusion,
        values={"weight_dtype = torch.float32": "weight_dtype = torch.float64", "check_min_version(": "print("},
        around="noise.of_a_diffusion",
        per_rank=True,
    ),
)
