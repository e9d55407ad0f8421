"""Packages that only parts of HetSync need: the extras of setup.cfg."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec

from hetsync.errors import UserError

# By extra: module, and the package that brings it.
EXTRAS = {
    "digits": {"sklearn": "scikit-learn"},
    "images": {"PIL": "pillow"},
    "text": {"sacrebleu": "sacrebleu"},
    "tensorboard": {"tensorboard": "tensorboard"},
    "mlflow": {"mlflow": "mlflow-skinny"},
    "wandb": {"wandb": "wandb"},
    "control": {"gymnasium": "gymnasium", "stable_baselines3": "stable-baselines3"},
    "lightning": {"lightning": "lightning"},
    "sensors": {"h5py": "h5py"},
    "report": {"bokeh": "bokeh"},
    "predict": {"pyarrow": "pyarrow"},
}


def require(extra: str, what: str) -> None:
    """UserError with the command that installs them, unless the packages are there that `what` needs."""
    missing = [package for module, package in EXTRAS[extra].items() if find_spec(module) is None]
    if missing:
        raise UserError(f"{what} needs {' and '.join(missing)}: {install_command(*missing)}")


def install_command(*packages: str) -> str:
    """Of packages, as no index has HetSync itself, and for the running interpreter, which need not be in the PATH."""
    return f"{shlex.quote(sys.executable)} -m pip install {' '.join(packages)}"
