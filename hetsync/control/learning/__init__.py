"""Learning a policy beforehand, on simulated jobs. The only part of control that reaches the simulator."""
