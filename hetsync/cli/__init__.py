"""Command lines: one module a command."""
