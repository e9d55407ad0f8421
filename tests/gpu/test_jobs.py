"""Jobs of ranks that share a device: what they come to is what one process would, or counts every sample."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from jobs import command, environment
from rank_jobs import job
from ranks import EPOCHS, SAMPLES

pytestmark = pytest.mark.gpu


def test_the_plane_sums_what_the_device_is_still_working_on(device: str) -> None:
    worst = job("contract", device, ranks=3)
    assert worst["float32"] == 0
    assert max(worst["bfloat16"], worst["int8"]) < 0.02


@pytest.mark.parametrize("stream", ["default", "own", "batch"])
@pytest.mark.parametrize(("precision", "most"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_synchronous_training_equals_one_process(precision: str, most: float, stream: str, device: str) -> None:
    assert job("synchronous", device, precision, stream)["furthest"] < most


@pytest.mark.parametrize("kind", ["plain", "own stream", "stream a batch", "wire", "scaler", "compile", "graphs"])
def test_delayed_training_learns_and_counts(kind: str, device: str) -> None:
    if kind in ("compile", "graphs"):
        pytest.importorskip("triton")
    found = job("delayed", device, kind)
    assert found == {"same": True, "applied": EPOCHS * SAMPLES, "booked": EPOCHS * SAMPLES, "learned": True}


@pytest.mark.parametrize("delay_bound", [0, 4])
def test_a_job_may_mix_cpu_and_cuda_ranks(delay_bound: int, device: str) -> None:
    assert job("mixed", device, delay_bound, ranks=3) == {"applied": EPOCHS * SAMPLES}


@pytest.fixture
def digits() -> None:
    """Of these recipes."""
    pytest.importorskip("sklearn")


@pytest.mark.usefixtures("digits")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_recipe_runs_on_the_device(precision: str, device: str, tmp_path: Path) -> None:
    words = ["--run.dir", tmp_path / "run", "--run.samples", 2000, "--run.device", device, "--run.precision", precision]
    subprocess.run(command(*words, ranks=2), check=True, timeout=120, env=environment())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    if device == "cuda":
        assert all(torch.cuda.get_device_name() in row["device"] for row in summary["per_rank"])


@pytest.mark.usefixtures("digits")
def test_an_emulated_device_may_be_a_gpu(device: str, tmp_path: Path) -> None:
    words = ["--run.dir", tmp_path / "run", "--run.samples", 640, "--run.device", device, "--emulate", "homogeneous"]
    done = subprocess.run(
        command(*words, "--emulation.samples_per_second", 400, ranks=2), timeout=120, env=environment(), check=False
    )
    assert done.returncode == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["emulated"] is True


@pytest.mark.usefixtures("digits")
def test_a_plan_cuts_the_model_over_ranks_of_one_device(device: str, tmp_path: Path) -> None:
    plan = {
        "format": 1,
        "batch_size": 64,
        "replicas": [
            {
                "micro_batches": 4,
                "stages": [{"ranks": [0], "blocks": ["features"]}, {"ranks": [1], "blocks": ["classifier"]}],
            }
        ],
    }
    (tmp_path / "plan.yaml").write_text(json.dumps(plan))
    words = ["--run.dir", tmp_path / "run", "--run.samples", 2048, "--run.device", device, "--data.batch_size", 64]
    subprocess.run(
        command(*words, "--plan", tmp_path / "plan.yaml", ranks=2), check=True, timeout=120, env=environment()
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    for row in summary["per_rank"]:
        assert 0 < row["compute_fraction"] < 1
        assert 0 < row["memory_bytes"] < 2**30  # profiling tries twice the batch, and more
