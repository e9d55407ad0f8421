"""`hetsync checkpoint verify`: a line a checkpoint, and its exit status."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetsync.cli import main as cli
from hetsync.train.checkpoint import Progress, save


@pytest.fixture
def run(tmp_path: Path) -> Path:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for samples in (10, 20):
        progress = Progress(
            samples_applied=samples,
            version=1,
            ranks=1,
            shares=(4,),
            delay_bound=0,
            quorum=1.0,
            accumulation=1,
            train_seconds=0.0,
        )
        save(tmp_path / "checkpoints", progress, model, [optimizer], None, 3)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    """Exit status, output, complaints."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["checkpoint", *map(str, words)])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_sound_ones(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = "".join(f"samples-0000000000{samples} is as it was saved\n" for samples in (10, 20))
    assert said(capsys, "verify", run) == (0, out, "")


def test_a_damaged_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "checkpoints" / "samples-000000000010" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    status, out, err = said(capsys, "verify", run)
    assert (status, err) == (1, "")
    assert out.splitlines() == [
        "samples-000000000010 is damaged: model.safetensors changed since it was saved",
        "samples-000000000020 is as it was saved",
    ]


def test_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = said(capsys, "verify", tmp_path)
    assert (status, out) == (2, "")
    assert "there is no complete checkpoint in" in err
    assert err.count("\n") == 1
