"""What travels between ranks is read as data: nothing in it is called that does more."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import zlib
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hetsync.errors import OwnMistakeError, UserError
from hetsync.plane import codec
from hetsync.plane.base import DamagedError
from hetsync.sync.messages import AssignTask, EventBatch, Probe, Task, TaskFinished


class Kind(Enum):
    ONE = 1


class Pair(NamedTuple):
    left: int
    right: Any


@dataclass(frozen=True)
class Record:
    values: dict[str, Pair]


class Other:
    pass


def with_checksum(pickled: bytes) -> bytes:
    return pickled + zlib.crc32(pickled).to_bytes(4, "big")


class Acts:
    """Of the attacker's: calls whatever it names."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize(
    "value",
    [
        EventBatch([TaskFinished(1, 2, 3, 0.5), Probe(0)]),
        AssignTask(0, Task(1, (((0, 3),),), 4, 0, 0)),
        Record({"a": Pair(1, Kind.ONE)}),
        [None, True, 1, 1.5, 2j, "a", b"a", bytearray(b"a"), (1,), {2}, frozenset({3}), {4: 5}, range(6), slice(7)],
        [Counter("aab"), OrderedDict(a=1), defaultdict(list, a=[1]), Path("a"), Decimal("1.5")],
        [torch.float32, torch.Size([2, 3]), torch.device("cpu"), np.float64(1.5), np.dtype("int32")],
    ],
)
def test_records_and_plain_values_arrive(value: Any) -> None:
    assert codec.loads(codec.dumps(value)) == value


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_and_arrays_arrive(kind: torch.dtype) -> None:
    tensor = torch.ones(3, 2).to(kind).t()
    arrived = codec.loads(codec.dumps({"all": tensor, "part": tensor[1:], "none": tensor[:0]}))
    assert torch.equal(arrived["all"], tensor)
    assert torch.equal(arrived["part"], tensor[1:])
    assert arrived["none"].shape == (0, 3)
    assert np.array_equal(codec.loads(codec.dumps(np.arange(3))), np.arange(3))
    state = torch.nn.BatchNorm1d(2).state_dict()
    assert codec.loads(codec.dumps(state)).keys() == state.keys()


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"])
def test_sparse_tensors_arrive(layout: str) -> None:
    dense, of = torch.eye(4).double(), getattr(torch, layout)
    sparse = dense.to_sparse(layout=of, blocksize=(2, 2) if "_bs" in layout else None)
    found = codec.loads(codec.dumps({"graph": sparse}))["graph"]
    assert found.layout is of
    assert torch.equal(found.to_dense(), dense)


def test_indices_out_of_bounds_are_no_way_in() -> None:
    bad = torch.sparse_coo_tensor([[7], [0]], [1.0], (2, 2), check_invariants=False)
    with pytest.raises(RuntimeError, match="size is inconsistent with indices"):
        codec.loads(codec.dumps(bad))


def test_a_mistake_arrives() -> None:
    arrived = codec.loads(codec.dumps(OwnMistakeError("run.dir is x: choose another")))
    assert isinstance(arrived, OwnMistakeError)
    assert str(arrived) == "run.dir is x: choose another"


@pytest.mark.parametrize(
    "value",
    [
        Acts(os.system, "touch acted"),
        Acts(subprocess.Popen, ["touch", "acted"]),
        Acts(eval, "open('acted', 'w')"),
        Acts(getattr, "text", "upper"),
        Acts(torch.load, "acted"),
        Other(),
    ],
)
def test_what_would_act_is_refused(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="does not travel between ranks: give numbers, text, tensors, dataclasses"):
        codec.loads(codec.dumps([value]))
    assert not list(tmp_path.iterdir())


def test_a_tensor_s_bytes_are_no_way_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own reader of them would unpickle anything."""
    monkeypatch.chdir(tmp_path)
    torch.save(Acts(os.system, "touch acted"), tmp_path / "inner", _use_new_zipfile_serialization=False)
    inner = (tmp_path / "inner").read_bytes()
    with pytest.raises((pickle.UnpicklingError, UserError)):
        codec.loads(codec.dumps(Acts(torch.storage._load_from_bytes, inner)))
    assert not (tmp_path / "acted").exists()


def test_nothing_is_imported_for_a_message() -> None:
    with pytest.raises(UserError, match=r"a value of antigravity\.Record does not travel"):
        codec.loads(with_checksum(b"cantigravity\nRecord\n."))
    with pytest.raises(UserError, match="does not travel"):
        codec.loads(with_checksum(b"\x80\x04\x8c\x0bdataclasses\x8c\x0esys.modules.os\x93."))


MEMBER_OLD = Acts(getattr, Kind, "ONE")  # as Python 3.11.0 to 3.11.3 name a member
SIGNAL_OLD = b"csignal\nSIGTERM\n."  # and one that is in its module as well


def test_members_of_enumerations_arrive_from_every_python() -> None:
    assert codec.loads(with_checksum(pickle.dumps(MEMBER_OLD))) is Kind.ONE
    assert codec.loads(with_checksum(SIGNAL_OLD)) is signal.SIGTERM
    for value in (Kind.ONE, signal.SIGTERM):
        assert codec.loads(codec.dumps(value)) is value


@pytest.mark.parametrize("names", [(Kind, "mro"), (Kind, "__class__"), (Record, "__init__"), (Kind, "TWO"), (Kind, [])])
def test_nothing_else_is_got_by_its_name(names: Any) -> None:
    own = {("builtins", "getattr"): getattr}  # of a rank whose own value has a member of an enumeration
    for named in ({}, own):
        with pytest.raises(UserError, match="does not travel between ranks"):
            codec.loads(with_checksum(pickle.dumps(Acts(getattr, *names))), named)


def test_what_a_rank_names_itself_may_come_from_others() -> None:
    theirs, named = codec.dumps_own({"mine": Other()})
    assert isinstance(codec.loads(theirs, named)["mine"], Other)
    with pytest.raises(UserError, match=r"test_codec\.Other does not travel"):
        codec.loads(theirs)
    with pytest.raises(UserError, match="does not travel"):
        codec.loads(with_checksum(pickle.dumps(Acts(os.getpid))), named)


def test_a_flipped_bit_is_noticed_wherever_it_is() -> None:
    sent = codec.dumps(EventBatch([TaskFinished(1, 2, 3, 0.5)]))
    for bit in range(8 * len(sent)):
        damaged = bytearray(sent)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError, match=r"a message of rank 3 has arrived damaged.*go on with --resume"):
            codec.loads(damaged, sender=3)
    with pytest.raises(DamagedError):
        codec.loads(b"")
