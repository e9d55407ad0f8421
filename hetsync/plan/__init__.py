"""Which ranks hold which part of a model: its blocks, what they cost, and what a schedule of them takes."""
