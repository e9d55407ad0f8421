"""HetSync trains PyTorch models on clusters whose devices differ."""

__version__ = "0.1.0"
