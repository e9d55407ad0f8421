"""A training job on one rank, from recipe to summary."""
