"""Batch scripts for SLURM: what a job asks for, and how it goes on after a stop or a crash."""
