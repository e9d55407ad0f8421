"""What a recipe may ask of a controller, and with which settings a resumed run begins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetsync.config.schema import Config, ControlConfig, SyncConfig
from hetsync.errors import UserError
from hetsync.sync.messages import Settings
from hetsync.train.checkpoint import Progress
from hetsync.train.resumption import first_settings


@pytest.mark.parametrize(
    ("sync", "control", "said"),
    [
        ({"delay_bound": None}, {}, r"sync\.delay_bound is null, where control\.name goodput may set 1 to 16"),
        ({"delay_bound": 0}, {}, r"sync\.delay_bound is 0, .* change control\.min_delay_bound"),
        ({"accumulation": 9}, {}, r"sync\.accumulation is 9, where control\.name goodput may set 1 to 8"),
        ({}, {"interval_seconds": 0}, r"control\.interval_seconds is 0: it must be greater than 0"),
        ({}, {"min_accumulation": 0}, r"control\.min_accumulation is 0"),
        ({}, {"min_accumulation": 9}, r"control\.max_accumulation is 8: it must be at least 9"),
        ({}, {"min_delay_bound": -1}, r"control\.min_delay_bound is -1"),
        ({}, {"max_delay_bound": 0}, r"control\.max_delay_bound is 0: it must be at least 1"),
        ({}, {"policy": "x.safetensors"}, r"control\.policy is x\.safetensors, but control\.name is goodput"),
        ({}, {"fine_tune": True}, r"control\.fine_tune is True, but control\.name is goodput"),
    ],
)
def test_what_cannot_be_controlled_is_refused(sync: dict[str, Any], control: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Config(sync=SyncConfig(**sync), control=ControlConfig("goodput", **control))


def test_a_job_without_a_controller_may_have_any_settings() -> None:
    Config(sync=SyncConfig(delay_bound=None, accumulation=99))


def test_synchronous_training_is_controlled_where_the_bounds_say_so() -> None:
    Config(sync=SyncConfig(delay_bound=0), control=ControlConfig("ppo", min_delay_bound=0, max_delay_bound=0))


def test_a_resumed_run_goes_on_with_what_its_controller_had_set() -> None:
    progress = Progress(
        samples_applied=100,
        version=7,
        ranks=2,
        shares=(4, 4),
        delay_bound=9,
        quorum=0.5,
        accumulation=4,
        train_seconds=1.0,
    )
    controlled = Config(control=ControlConfig("goodput", max_delay_bound=8))
    assert first_settings(controlled, None, 0) == Settings(4, 0.25, 1)
    assert first_settings(controlled, progress, 0) == Settings(8, 0.25, 4)  # within the bounds of today
    by_hand = Config(sync=SyncConfig(quorum=0.25))
    assert first_settings(by_hand, progress, 0) == Settings(4, 0.25, 1)


def test_a_resumed_run_goes_on_with_the_k_and_q_that_its_rule_had_found() -> None:
    progress = Progress(
        samples_applied=100,
        version=7,
        ranks=2,
        shares=(4, 4),
        delay_bound=16,
        quorum=0.5,
        accumulation=2,
        train_seconds=1.0,
    )
    ruled = Config(sync=SyncConfig(delay_bound=4, accumulation="auto"))
    assert first_settings(ruled, None, 0) == Settings(4, 0.25, 1)
    assert first_settings(ruled, progress, 0) == Settings(4, 0.5, 2)
    assert first_settings(Config(sync=SyncConfig(delay_bound=4)), progress, 0) == Settings(4, 0.5, 1)
    assert first_settings(ruled, replace(progress, accumulation=8), 0).accumulation == 4  # its greatest
    assert first_settings(ruled, replace(progress, grace=1), 0) == Settings(4, 0.5, 2, grace=1)
    assert first_settings(ruled, replace(progress, fragments=4), 10**6).fragments == 4
    synchronous = Config(sync=SyncConfig(delay_bound=0, accumulation="auto"))  # where K is a part of the batch
    assert first_settings(synchronous, progress, 0).accumulation == 1
    assert first_settings(ruled, replace(progress, delay_bound=0, accumulation=4), 0).accumulation == 1
