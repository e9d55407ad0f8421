"""Searches for placements: each proposes, hears what its proposals cost, and proposes again."""
