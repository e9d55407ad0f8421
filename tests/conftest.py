"""Puts this folder on the path, for what several folders' tests share (`jobs`). Imports no MPI."""
