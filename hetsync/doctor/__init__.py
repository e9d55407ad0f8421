"""What may keep a machine, or the nodes of a job, from training: facts, and what they come to."""
