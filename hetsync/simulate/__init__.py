"""A virtual cluster: the job's state machine on a virtual clock, with or without gradients (docs/guide/simulate.md)."""

from hetsync.simulate.learner import Learner
from hetsync.simulate.polling import Runtime
from hetsync.simulate.scenario import Scenario, Traffic
from hetsync.simulate.script import Change
from hetsync.simulate.simulation import Simulation
from hetsync.sync.observation import Observation

__all__ = ["Change", "Learner", "Observation", "Runtime", "Scenario", "Simulation", "Traffic"]
