"""Ranks that die under Accelerate's Accelerator and Hugging Face's Trainer: the others end where all would have.

python -m pytest tests/fault/test_doors.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from jobs import ROOT, Done, finished, mpirun, started

RANKS = 3
ACCELERATOR = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from hetsync.neighbours.accelerate import Accelerator

accelerator = Accelerator({settings})
torch.manual_seed(0)
inputs = torch.randn(96, 5)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
model, optimizer, loader, test_loader = accelerator.prepare(
    model, optimizer, DataLoader(data, 4, shuffle=True), DataLoader(data, 8)
)
for _ in range(4):
    for x, y in loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
errors = [accelerator.gather_for_metrics((model(x) - y).detach() ** 2) for x, y in test_loader]
found = torch.cat(errors)
accelerator.print(f"ended with {{len(found)}} of {{accelerator.num_processes}}: {{found.mean():.5f}}", flush=True)
"""
TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, set_seed
from hetsync.neighbours.transformers import Trainer, TrainingArguments

set_seed(0)
sizes = dict(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
none = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
model = GPT2LMHeadModel(GPT2Config(**sizes, **none, bos_token_id=0, eos_token_id=0))
rows = [[(first + place) % 30 + 1 for place in range(12)] for first in range(96)]
data = [dict(input_ids=torch.tensor(row), labels=torch.tensor(row)) for row in rows]
arguments = TrainingArguments(
    "saved", per_device_train_batch_size=4, num_train_epochs=4, learning_rate=0.2, optim="sgd", report_to=[],
    use_cpu=True, disable_tqdm=True, save_strategy="epoch", logging_strategy="no", hetsync=dict({settings})
)
trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
trainer.train()
found = trainer.predict(data)
if trainer.is_world_process_zero():
    size, ranks = len(found.predictions), trainer.accelerator.num_processes
    print(f"ended with {{size}} of {{ranks}}: {{found.metrics['test_loss']:.5f}}", flush=True)
"""


EVALUATED = """
import os, signal
from transformers import TrainerCallback

class Mortal(Trainer):
    def evaluate(self, *arguments, **options):
        if self.job.rank == 1 and self.state.global_step == STEP and self.is_in_train:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().evaluate(*arguments, **options)
"""


def run(folder: Path, script: str, settings: str) -> Done:
    folder.mkdir()
    (folder / "script.py").write_text(script.format(settings=settings))
    words = [*mpirun(RANKS), "--with-ft", "ulfm", sys.executable, "script.py"]
    with started(words, folder, {"PYTHONPATH": str(ROOT)}) as process:
        return finished(process)


def ending(done: Done) -> tuple[int, int, float]:
    """Samples evaluated, ranks then, and the error."""
    assert done.status == 0, done.story
    ((samples, ranks, error),) = re.findall(r"^ended with (\d+) of (\d+): ([\d.]+)$", done.out, re.MULTILINE)
    return int(samples), int(ranks), float(error)


@pytest.mark.each_value(1)
@pytest.mark.parametrize("script", [ACCELERATOR, TRAINER], ids=["accelerator", "trainer"])
@pytest.mark.parametrize(("rank", "bound"), [(0, 0), pytest.param(2, 4, marks=pytest.mark.thorough)])
def test_the_others_go_on_and_evaluate_all(tmp_path: Path, script: str, rank: int, bound: int) -> None:
    if script is TRAINER:
        pytest.importorskip("transformers")
    die = {"kind": "die", "rank": rank, "round": 9, "when": "during"}
    whole = ending(run(tmp_path / "whole", script, f"delay_bound={bound}"))
    left = ending(run(tmp_path / "left", script, f"delay_bound={bound}, fault=dict(inject=[{die}])"))
    assert whole[:2] == (96, RANKS)
    assert left[:2] == (96, RANKS - 1)
    assert left[2] == pytest.approx(whole[2], rel=1e-4 if bound == 0 else 0.3)


@pytest.mark.thorough
@pytest.mark.parametrize("step", [12, pytest.param(8, marks=pytest.mark.thorough)])  # in the loop, and after it
def test_an_evaluation_in_which_a_rank_dies_is_made_by_the_others(tmp_path: Path, step: int) -> None:
    pytest.importorskip("transformers")
    by_steps = 'save_strategy="steps", save_steps=4, eval_strategy="steps", eval_steps=4'
    script = TRAINER.replace('save_strategy="epoch"', by_steps).replace("trainer = Trainer(", "trainer = Mortal(")
    script = script.replace("\nset_seed(0)", EVALUATED.replace("STEP", str(step)) + "\nset_seed(0)")
    told = "    print('at', [entry['step'] for entry in trainer.state.log_history if 'eval_loss' in entry])\n"
    done = run(tmp_path / "job", script + told, "delay_bound=0")
    assert ending(done)[:2] == (96, RANKS - 1)
    due = list(range(4, 33, 4))
    assert f"at {due}" in done.out, done.story
    saved = {path.name for path in (tmp_path / "job" / "saved").iterdir()}
    assert saved == {f"checkpoint-{each}" for each in due}
