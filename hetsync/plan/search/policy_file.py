"""Files of policies that improve plans: safetensors, with what they learned from as JSON in the metadata."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from hetsync.errors import UserError
from hetsync.files import write_atomically
from hetsync.plan.search.features import DEVICES, GROUPS, PAIRS, VERSION
from hetsync.plan.search.placement_policy import PACES, PlacementPolicy

SPECIFICATION = "hetsync_plan_policy"
SHIPPED = Path("shipped")  # stands for the policy that comes along
GENERAL = "general.safetensors"
SEEN = (*GROUPS, *DEVICES, *PAIRS, *PACES)


@dataclass(frozen=True)
class Specification:
    """How a policy was learned.

    Attributes:
        width: Of its layers.
        command: What made the file.
        seed: Of everything drawn.
        steps: Updates.
        curve: (updates so far, mean fall of a problem's log objective since the last entry).
        features: Names of the inputs, in order.
        features_version: Version of these.
    """

    width: int
    command: str
    seed: int
    steps: int
    curve: tuple[tuple[int, float], ...]
    features: tuple[str, ...] = SEEN
    features_version: int = VERSION


def save_policy(path: Path, policy: PlacementPolicy, specification: Specification) -> None:
    """All of the file or nothing. UserError where that fails."""
    weights = {name: tensor.detach().contiguous() for name, tensor in policy.state_dict().items()}
    content = save(weights, {SPECIFICATION: json.dumps(asdict(specification))})
    write_atomically(path, content, "choose another --output")


def load_policy(path: Path) -> PlacementPolicy:
    """That of a file, or the one that comes along (`SHIPPED`). UserError where the file cannot be read, or its policy
    sees other features."""
    if path != SHIPPED:
        return _read(path)
    with resources.as_file(resources.files("hetsync.plan") / "policies" / GENERAL) as general:
        return _read(general)


def _read(path: Path) -> PlacementPolicy:
    if not path.is_file():
        raise UserError(
            f"--policy {path} does not exist: make one by hetsync plan --pretrain --output {path}, or give {SHIPPED}"
        )
    try:
        with safe_open(path, framework="pt") as opened:
            told = json.loads((opened.metadata() or {})[SPECIFICATION])
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, no mapping
        if not all(tensor.isfinite().all() for tensor in weights.values()):
            raise ValueError("its weights are not finite")
        seen, version, width = tuple(told["features"]), told["features_version"], int(told["width"])
    except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"--policy {path} is no policy for plans ({error}): give what hetsync plan --pretrain has written"
        ) from error
    if (seen, version) != (SEEN, VERSION):
        raise UserError(
            f"--policy {path} sees version {version} of the features of plans, this HetSync version {VERSION}: train it"
            f" anew by hetsync plan --pretrain --output {path}"
        )
    try:
        policy = PlacementPolicy(width)
        policy.load_state_dict(weights)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"--policy {path} holds other layers than its width of {width} says: train it anew") from error
    return policy
