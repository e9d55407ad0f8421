"""Hugging Face's Trainer and adapters of peft, on a HetSync job: mpirun -np N python trainer_lora.py

A small GPT-2 without pretrained weights learns to count on: what is frozen, and stays, is random.
"""

import random

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

from hetsync.neighbours.transformers import Trainer, TrainingArguments

WORDS = 30


def sequences(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Of unequal length; 0 fills up."""
    drawn = random.Random(seed)
    starts = [(drawn.randrange(WORDS), drawn.randint(1, 3), drawn.randint(8, 32)) for _ in range(count)]
    return [{"input_ids": [(first + step * place) % WORDS + 1 for place in range(n)]} for first, step, n in starts]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


set_seed(0)
config = GPT2Config(
    vocab_size=WORDS + 1, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
)
adapters = LoraConfig(
    r=16, target_modules=["c_attn", "c_fc", "c_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
)
arguments = TrainingArguments(
    "runs/lora",
    per_device_train_batch_size=8,
    num_train_epochs=4,
    learning_rate=3e-3,
    eval_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=1,
    logging_steps=50,
    report_to=[],
)
trainer = Trainer(
    model=get_peft_model(GPT2LMHeadModel(config), adapters),
    args=arguments,
    data_collator=collate,
    train_dataset=sequences(2000, seed=1),
    eval_dataset=sequences(200, seed=2),
)
trainer.train()
metrics = trainer.evaluate()
if trainer.is_world_process_zero():
    print(f"loss {metrics['eval_loss']:.3f}")
