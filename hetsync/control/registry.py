"""Controllers by name."""

from __future__ import annotations

from hetsync.config.schema import ControlConfig
from hetsync.control.actions import Limits
from hetsync.control.baselines import Fixed, Goodput, Proportional, Random, Schedule
from hetsync.control.controller import Controller
from hetsync.extras import require


def make_controller(config: ControlConfig, seed: int, batch_size: int) -> Controller:
    """The controller that a recipe's `control` section names, for a job with this batch (B). Put it into an `Envelope`.

    UserError where `control.policy` cannot be read or does not fit, or where learning on needs what is not installed.
    """
    limits = Limits.of(config)
    match config.name:
        case "fixed":
            return Fixed()
        case "random":
            return Random(limits, seed)
        case "schedule":
            return Schedule(limits)
        case "proportional":
            return Proportional(limits)
        case "goodput":
            return Goodput(limits, batch_size)
        case "ppo":
            return _learned(config, limits, seed, batch_size)


def check(config: ControlConfig) -> None:
    """Is there the policy that a recipe names, and does it fit? UserError as above; far quicker than the making."""
    if config.fine_tune:
        require("control", "learning a policy")
    if config.name == "ppo":
        from hetsync.control.policy_network import load_network

        load_network(config.policy)


def _learned(config: ControlConfig, limits: Limits, seed: int, batch_size: int) -> Controller:
    if config.fine_tune:
        from hetsync.control.fine_tuning import FineTuned  # loads stable-baselines3, which takes seconds

        return FineTuned(config.policy, limits, batch_size, config.interval_seconds, seed)
    from hetsync.control.policy_network import PolicyController, load_network

    return PolicyController(load_network(config.policy), limits, batch_size)
