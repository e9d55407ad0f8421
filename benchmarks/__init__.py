"""Measurements of HetSync and of what users would pick instead. Started from the clone: `python -m benchmarks.NAME`."""
