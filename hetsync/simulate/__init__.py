"""A virtual cluster: the engine's policy on a virtual clock, with or without gradients. See docs/simulator.md."""

from hetsync.control.observation import Observation
from hetsync.simulate.learner import Learner
from hetsync.simulate.scenario import Runtime, Scenario, Traffic
from hetsync.simulate.script import Change
from hetsync.simulate.simulation import Simulation

__all__ = ["Change", "Learner", "Observation", "Runtime", "Scenario", "Simulation", "Traffic"]
