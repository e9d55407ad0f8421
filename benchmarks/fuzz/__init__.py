"""Damaged inputs: each one works or is refused in a sentence, within seconds."""
