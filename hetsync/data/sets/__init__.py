"""Data sets, one file a format: how to read it (`Data`), and how to check what lies on a disk."""
