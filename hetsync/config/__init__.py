"""Recipes: their keys, how they are read, and how a mistake in one is told."""
