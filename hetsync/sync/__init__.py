"""Delay synchronisation. `state_machine` decides, `coordinator` speaks for it on rank 0, `engine` carries it out on
every rank, `deltas` and `gradients` hold what travels.
"""
