"""Descriptions of clusters, each figure with its source; `hetsync.profiling.cluster` has their schema."""
