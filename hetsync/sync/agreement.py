"""At rest all ranks hold the same values of everything that a checkpoint holds; digests of them are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number

import torch

from hetsync.balance.gpu import gpu_name, mps_name
from hetsync.errors import UserError, complain
from hetsync.plane.base import Plane
from hetsync.sync.buffers import Change, Rule, merged, merged_at_rest
from hetsync.sync.digests import Digests, digest_of
from hetsync.sync.group_state import GroupState, Held
from hetsync.sync.optimizer_state import set_state, state_by_place
from hetsync.sync.reals import reals
from hetsync.sync.sparse import equal, is_sparse

# Processors of other instruction sets round an optimizer's step in the last bit, and some thousand steps on the same
# sums of gradients add that up to a hundred-thousandth of a tensor's largest value.
TOLERANCE = 1e-4
AVERAGE = "average."  # begins the names of what averages hold
GROUPS = "groups "  # begin the names of what optimizers hold beside the state of weights


class AnchorMismatchError(UserError):
    """Ranks that must hold the same values do not: most often by what a loop or a model does beside its steps."""


def processor(device: torch.device) -> str:
    """Devices that are called the same compute the same bits. Threads count: libraries cut their work by them (a QR
    that a constraint makes)."""
    if device.type == "cuda":
        return gpu_name(device)
    if device.type == "mps":
        return mps_name()
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


class Agreement:
    """One rank's part. `values` is what a checkpoint holds, by name."""

    def __init__(
        self,
        plane: Plane,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        averages: Sequence[torch.nn.Module] = (),
        groups: Sequence[GroupState] = (),
    ) -> None:
        """`groups`: of the optimizers."""
        self._plane = plane
        self._model = model
        self._optimizers = optimizers
        self._averages = averages
        self.groups = groups
        self.digests = Digests()
        self._counters: dict[str, torch.Tensor] = {}
        self._told = False

    def remember_counters(self) -> None:
        """Call when all ranks hold the same model."""
        self._counters = {name: buffer.clone() for name, (buffer, _) in self._merged().items()}

    def _state(self) -> dict[str, torch.Tensor]:
        state = dict(self._model.state_dict())
        for number, module in enumerate(self._averages):
            state |= {f"{AVERAGE}{number}.{name}": tensor for name, tensor in module.state_dict().items()}
        return state

    def _merged(self) -> dict[str, tuple[torch.Tensor, Rule]]:
        """Buffers that ranks change for themselves between rests. Those of averages follow the model's."""
        found = merged_at_rest(self._model)
        for number, module in enumerate(self._averages):
            for name, tensor in module.state_dict().items():
                if not tensor.is_floating_point():
                    found[f"{AVERAGE}{number}.{name}"] = tensor, "rows"
        return found

    @torch.no_grad()
    def share_counters(self, samples: int, of_averages: bool = True) -> None:
        """Collective: what ranks have made of buffers since the last rest, this one on so many samples, and what no
        round sums (whole numbers, rows), becomes one by each buffer's rule. Without `of_averages` this rank's lack a
        step, and what others have counted there holds."""
        buffers = self._merged()
        changed = {name: now.cpu() for name, (now, _) in buffers.items() if not torch.equal(now, self._counters[name])}
        told = {name: now for name, now in changed.items() if of_averages or not name.startswith(AVERAGE)}
        everyones = self._plane.gather_objects({name: Change(now, samples) for name, now in told.items()})
        for name in sorted({name for theirs in everyones for name in theirs}):
            now, rule = buffers[name]
            changes = [theirs[name] for theirs in everyones if name in theirs]
            now.copy_(merged(rule, self._counters[name].cpu(), changes))
        self.remember_counters()

    def values(self, outer: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Everything that a checkpoint holds. The anchor, at rest, is what weights are (`Deltas.reset_to_anchor`)."""
        found = self._state()
        for state in self._optimizer_state().values():
            found |= state
        for number, groups in enumerate(self.groups):
            found |= {f"{GROUPS}{number} {name}": value for name, value in groups.values().items()}
        return found if outer is None else {**found, "outer": outer}

    def reach(self, values: Mapping[str, torch.Tensor], device: torch.device, version: int) -> bool:
        """Collective: compare; True where ranks of other processors took over rank 0's values.

        Raises AnchorMismatchError, naming the ranks and the first of the values.
        """
        if len(self._plane.members) == 1:
            return False
        everyones, differing = self._compared(values, device)
        if not differing:
            return False
        odd = [place for place, (digest, _) in enumerate(everyones) if digest != everyones[0][0]]
        if any(everyones[place][1] == everyones[0][1] for place in odd):
            raise AnchorMismatchError(self._difference(differing, odd, version))
        self._take_over(values, differing, odd, version)
        return True

    def _compared(
        self, values: Mapping[str, torch.Tensor], device: torch.device
    ) -> tuple[list[tuple[str, str]], list[str]]:
        """Collective: by the places of members a digest of all and the processor; and the names of what is not the
        same on all ranks, the model's first."""
        digests = self.digests.of(values, self._untrained() & values.keys())
        everyones: list[tuple[str, str]] = self._plane.gather_objects((digest_of(digests), processor(device)))
        if len({digest for digest, _ in everyones}) == 1:
            return everyones, []
        told: list[dict[str, str]] = self._plane.gather_objects(digests)
        names = {name: None for theirs in told for name in theirs}
        return everyones, [name for name in names if len({theirs.get(name) for theirs in told}) > 1]

    def _untrained(self) -> set[str]:
        """Names of what no step changes, or not each: frozen weights, buffers, averages."""
        weights = self._model.named_parameters(remove_duplicate=False)
        return self._state().keys() - {name for name, weight in weights if weight.requires_grad}

    @torch.no_grad()
    def reach_by_name(self, held: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Collective: as `reach`, where ranks hold parts of the model: ranks of other processors than a tensor's lowest
        holder take over its values, and what its optimizer has of them. AnchorMismatchError."""
        members = self._plane.members
        mine = self.digests.of(held, self._untrained() & held.keys()), processor(device)
        everyones: list[tuple[dict[str, str], str]] = self._plane.gather_objects(mine)
        lowest: dict[str, int] = {}
        odd = set()
        for place, (digests, kind) in enumerate(everyones):
            for name, digest in digests.items():
                first = lowest.setdefault(name, place)
                if digest == everyones[first][0][name]:
                    continue
                if kind == everyones[first][1]:
                    raise AnchorMismatchError(f"rank {members[place]} holds another {name} than rank {members[first]}")
                odd.add(name)
        if not odd:
            return
        states = self._state_by_weight()
        mine_of = {name: {name: tensor, **states.get(id(tensor), {})} for name, tensor in held.items() if name in odd}
        here = members.index(self._plane.rank)
        told = {
            name: {key: value.cpu() for key, value in values.items()}
            for name, values in mine_of.items()
            if lowest[name] == here
        }
        theirs = {name: values for each in self._plane.gather_objects(told) for name, values in each.items()}
        off = [_greatest_difference({name: held[name]}, {name: theirs[name][name]}) for name in mine_of]
        worst = max(self._plane.gather_objects(max(off, default=0.0)))
        if worst > TOLERANCE:
            raise AnchorMismatchError(f"holders of {sorted(odd)[0]} differ {_by_more(worst)}")
        for name, values in mine_of.items():
            self.adopt(values, theirs[name])
        if self._plane.leads and not self._told:
            self._told = True
            complain(
                f"ranks that hold the same weights have processors which round otherwise (by {worst:.1e} at most so"
                " far): at each rest they take over those of the lowest of them"
            )

    def _state_by_weight(self) -> dict[int, dict[str, torch.Tensor]]:
        """By a weight's id, what the optimizers hold of it, as `values` names it."""
        weights = [weight for each in self._optimizers for group in each.param_groups for weight in group["params"]]
        return {id(weights[place]): state for place, state in self._optimizer_state().items()}

    def _optimizer_state(self) -> dict[int, dict[str, torch.Tensor]]:
        """By the place of a weight among all, with names of their own: tensors and numbers. What else it keeps (lists
        of tensors, words) is made by steps, alike on all ranks, or after local steps the lowest rank's."""
        found: dict[int, dict[str, torch.Tensor]] = {}
        for place, state in state_by_place(self._optimizers).items():
            told = {name: value for name, value in state.items() if isinstance(value, torch.Tensor | Number)}
            kept = {name: torch.as_tensor(value) for name, value in told.items()}
            found[place] = {f"optimizer.{place}.{name}": value for name, value in kept.items()}
        return found

    @torch.no_grad()
    def take_over(
        self, values: Mapping[str, torch.Tensor], places: Sequence[int], device: torch.device, version: int
    ) -> None:
        """Collective: the values of the ranks at these places among the members, which hold the same.
        AnchorMismatchError where they do not."""
        everyones, differing = self._compared(values, device)
        digest, kind = everyones[places[0]]
        odd = [place for place in places if everyones[place][0] != digest]
        if any(everyones[place][1] == kind for place in odd):
            raise AnchorMismatchError(self._difference(differing, odd, version))
        gives = self._plane.members[places[0]] == self._plane.rank
        told = (_sent(values, differing), self.held()) if gives else None
        taken = self._plane.gather_objects(told)[places[0]]
        assert taken is not None
        theirs, held = taken
        self.adopt(values, theirs)
        self.take_held(held)

    def held(self) -> list[Held]:
        """What optimizers hold beside the state of weights."""
        return [groups.told() for groups in self.groups]

    def take_held(self, held: Sequence[Held]) -> None:
        for groups, theirs in zip(self.groups, held, strict=True):
            groups.take(theirs)

    @torch.no_grad()
    def adopt(self, values: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
        """Another rank's in place of these; but for what `take_held` takes."""
        for name, value in theirs.items():
            if name.startswith(GROUPS):
                continue
            if name not in values:  # of an optimizer that has not stepped here
                _, place, key = name.split(".", 2)
                set_state(self._optimizers, int(place), key, value)
            elif equal(values[name].cpu(), value):  # a frozen weight stays as it is
                continue
            elif name.startswith("optimizer."):  # it may be a plain number
                _, place, key = name.split(".", 2)
                set_state(self._optimizers, int(place), key, value)
            else:
                values[name].copy_(value)

    def _difference(self, differing: Sequence[str], odd: list[int], version: int) -> str:
        members = self._plane.members
        ranks, first = [members[place] for place in odd], differing[0]
        return (
            f"ranks {ranks} hold other weights than rank {members[0]} at version {version}: {first} differs (what the"
            " loop or a forward changes beside the optimizer's step, and of gradients before it, must change alike on"
            " all ranks: let random numbers come from a torch.Generator of one seed)"
        )

    @torch.no_grad()
    def _take_over(
        self, values: Mapping[str, torch.Tensor], differing: Sequence[str], odd: list[int], version: int
    ) -> None:
        first = self._plane.leads
        told = (_sent(values, differing), self.held()) if first else None
        theirs, held = self._plane.broadcast_object(told)
        mine = {name: values[name] for name in differing if name in values}
        differences = self._plane.gather_objects(_greatest_difference(mine, theirs))
        if max(differences) > TOLERANCE:
            raise AnchorMismatchError(f"{self._difference(differing, odd, version)}, {_by_more(max(differences))}")
        for name, value in mine.items():
            if not name.startswith(GROUPS) and not equal(value.cpu(), theirs[name]):
                value.copy_(theirs[name])
        self.take_held(held)
        if first and not self._told:
            self._told = True
            members = self._plane.members
            ranks = [members[place] for place in odd]
            complain(
                f"ranks {ranks} have other processors than rank {members[0]}, which round otherwise (by"
                f" {max(differences):.1e} at most so far): at each rest all take over rank {members[0]}'s weights"
            )


def _sent(values: Mapping[str, torch.Tensor], names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Those of these names, in the host's memory."""
    return {name: values[name].cpu() for name in names if name in values}


def _by_more(difference: float) -> str:
    return f"by {difference:.1e} of its largest value, where rounding on other processors may come to {TOLERANCE:.0e}"


def _greatest_difference(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """Relative to each tensor's largest value."""
    if mine.keys() != theirs.keys():
        return float("inf")
    worst = 0.0
    for name, value in mine.items():
        if value.shape != theirs[name].shape:
            return float("inf")
        if is_sparse(value):
            worst = worst if equal(value.cpu(), theirs[name].cpu()) else float("inf")
        elif value.numel():
            own, other = (reals(each.detach()).cpu().double() for each in (value, theirs[name]))
            off = (own - other).abs().nan_to_num(nan=0.0)  # of infinities
            worst = max(worst, float(off.max()) / max(1e-30, float(other.abs().nan_to_num(posinf=1.0).max())))
    return worst
