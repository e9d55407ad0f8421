"""What all ranks must be given alike is compared before anything is shared: later it would hang, or train wrongly."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from hetsync.config.schema import Config
from hetsync.data.loader import digest
from hetsync.errors import UserError, brief
from hetsync.plane.base import Plane, meet
from hetsync.sync.rates import scheduler_settings
from hetsync.train.evaluation import EvaluationLoader
from hetsync.train.parts import Parts
from hetsync.train.prepared import TrainingLoader

Description = Mapping[str, Any]  # by what a sentence calls it
OF_A_DEVICE = {"params", "foreach", "fused", "capturable"}  # in an optimizer's group
OF_A_START = {"resume", "fault.inject"}  # which a rank that joins later does not repeat
OF_EACH_RANK = {"run.device", "run.dir"}  # rank 0's folder is taken


def require_alike(plane: Plane, when: str, mine: Description) -> None:
    """Collective. UserError that names the first thing that differs, and on which rank; `when`: what all call."""
    told = meet(plane, when, dict(mine))
    for rank, theirs in enumerate(told):
        for name in {**told[0], **theirs}:
            first, other = (each.get(name, "missing") for each in (told[0], theirs))
            if first != other:
                raise UserError(
                    f"{name} is {brief(other)} on rank {rank}, but {brief(first)} on rank 0: give all ranks the same"
                )


def require_as_told(theirs: Description, mine: Description) -> None:
    """On a rank that joins a job under way: UserError that names the first thing in which it differs from the job."""
    for name in {**theirs, **mine}:
        job, other = (each.get(name, "missing") for each in (theirs, mine))
        if name not in OF_A_START and job != other:
            raise UserError(
                f"{name} is {brief(other)} in the process that joins, but {brief(job)} in the job: start it with the"
                " job's own command, code and recipe"
            )


def settings_described(config: Config, keep: bool, resume: Any, seeded: bool) -> Description:
    sections = dataclasses.asdict(config)
    keys = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    told = {key: value for key, value in keys.items() if key not in OF_EACH_RANK}
    seed = {} if seeded else {"run.seed": "the script's"}
    return {"the run folder": "given" if keep else "missing", "resume": str(resume), **told, **seed}


def data_described(loader: TrainingLoader, tests: Sequence[EvaluationLoader], total: int) -> Description:
    source = loader.source
    return {
        "the training data's length": len(source.dataset),  # type: ignore[arg-type]
        "batch_size": loader.batch_size,
        "the length of an epoch": source.epoch_samples,
        "the number of samples to train on": total,
        "shuffle": source.shuffle,
        "the digest of costs": digest(source.costs),
        "the digest of weights (drawn before hetsync.join, without a seed?)": digest(source.weights),
        "the choice of training samples (random_split before hetsync.join, without a seed?)": _choice(source.dataset),
        "the number of test loaders": len(tests),
        **{f"the length of test data {n}": len(test.whole) for n, test in enumerate(tests)},  # type: ignore[arg-type]
        **{f"the choice of test data {n}": _choice(test.whole) for n, test in enumerate(tests)},
    }


def _choice(dataset: Any) -> str:
    """A digest of what subsets within a data set have been made of: ranks that split data by chance would train on each
    other's test samples."""
    digest = hashlib.sha256()
    parts = [dataset]
    while parts:
        part = parts.pop()
        if isinstance(part, Subset):
            digest.update(_as_bytes(part.indices))
            parts.append(part.dataset)
        elif isinstance(part, ConcatDataset):
            parts += part.datasets
    return digest.hexdigest()[:8]


def _as_bytes(indices: Any) -> bytes:
    if isinstance(indices, range):  # perhaps of a long stream
        return repr(indices).encode()
    try:
        return np.asarray(indices, np.int64).tobytes()
    except (TypeError, ValueError):  # they may be names
        return repr(list(indices)).encode()


def parts_described(parts: Parts) -> Description:
    return dict(_parts(parts))


def _parts(parts: Parts) -> Iterator[tuple[str, Any]]:
    yield "the number of models", len(parts.models)
    for number, model in enumerate([*parts.models, *parts.averages]):
        state = model.state_dict(keep_vars=True)
        for name, tensor in state.items():
            if not isinstance(tensor, torch.Tensor):  # a module's extra state
                continue
            frozen = ", frozen" if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad else ""
            yield f"tensor {name} of model {number}", f"{tensor.dtype} of shape {tuple(tensor.shape)}{frozen}"
        yield f"the tensors of model {number}", list(state)
    yield "the number of averages", len(parts.averages)
    yield "the number of optimizers", len(parts.optimizers)
    for number, optimizer in enumerate(parts.optimizers):
        yield f"optimizer {number}", type(optimizer).__name__
        for place, group in enumerate(optimizer.param_groups):
            where = f"of group {place} of optimizer {number}"
            yield f"the number of weights {where}", len(group["params"])
            yield from ((f"{key} {where}", _plain(value)) for key, value in group.items() if key not in OF_A_DEVICE)
        yield f"the schedule of optimizer {number}", number in parts.factors
    yield "the schedulers", [type(each.scheduler).__name__ for each in parts.schedulers]
    for number, each in enumerate(parts.schedulers):
        for name, value in scheduler_settings(each.scheduler).items():
            yield f"{name} of scheduler {number}", value
    yield "the GradScaler", "given" if parts.scaler is not None else "missing"
    yield "what was registered", sorted(parts.registered)


def _plain(option: Any) -> Any:
    return option.tolist() if isinstance(option, torch.Tensor) else str(option)
