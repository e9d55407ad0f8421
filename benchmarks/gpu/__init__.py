"""What one machine with a GPU shows in ten minutes: `python -m benchmarks.gpu`."""
