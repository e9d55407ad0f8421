"""Faults on order: each wrong entry is one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from hetsync.config.faults import FaultConfig
from hetsync.config.parser import make_parser, parse_recipe
from hetsync.config.schema import Config, ControlConfig
from hetsync.errors import UserError

GOOD = {"kind": "die", "rank": 3, "round": 40}


def test_what_is_left_out_has_a_default() -> None:
    config, _ = parse_recipe(make_parser("", ""), ["--fault.inject", "[{kind: stop, rank: 1, when: drain}]"])
    (fault,) = config.fault.injected()
    assert str(fault) == "stop on rank 1, drain"
    assert fault.seconds is None
    (fault,) = FaultConfig(inject=[GOOD]).injected()
    assert str(fault) == "die on rank 3, during round 40"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "dye"}, r"kind is dye: it must be die, stop, .* or disk_full"),
        ({"rank": -1}, "rank is -1: it must be at least 0"),
        ({"rank": None}, "rank is null: it must be a whole number"),
        ({"round": None}, r"round is missing, and when is during"),
        ({"when": "drain"}, r"round is 40, but when is drain, which takes none"),
        ({"when": "noon"}, r"when is noon: it must be before, during, after"),
        ({"seconds": 1}, "seconds is 1.0, but kind is die, which takes none"),
        ({"kind": "slow"}, "factor is missing, which kind slow needs"),
        ({"kind": "slow", "factor": 1}, "factor is 1.0: it must be greater than 1"),
        ({"kind": "delay"}, "seconds is missing, which kind delay needs"),
        ({"kind": "disk_full"}, "rank is 3, but kind is disk_full: use 0"),
        ({"who": 1}, "there is no key fault.inject"),
    ],
)
def test_a_wrong_entry_is_one_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=rf"fault\.inject\[1\].*{said}|{said}\[1\]\.who"):
        FaultConfig(inject=[GOOD, {**GOOD, **changes}])


def test_an_entry_that_is_no_mapping_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"fault.inject"):
        parse_recipe(make_parser("", ""), ["--fault.inject", "[die]"])
    with pytest.raises(UserError, match=r"fault.inject"):
        parse_recipe(make_parser("", ""), ["--fault.inject", "die"])


def test_a_rank_that_is_not_there_is_one_sentence() -> None:
    config = FaultConfig(inject=[GOOD])
    config.check_ranks(4)
    with pytest.raises(UserError, match=r"fault.inject\[0\].rank is 3, but the job has 2 ranks: use 0 to 1"):
        config.check_ranks(2)
    with pytest.raises(UserError, match="hetsync simulate takes none"):
        config.check_uninjected("hetsync simulate")


def test_a_controller_knows_of_no_ranks_that_join():
    with pytest.raises(UserError, match=r"fault.replace is true, but control.name is random"):
        Config(fault=FaultConfig(replace=True), control=ControlConfig("random"))
