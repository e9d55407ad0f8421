"""What a job by a plan says of the plan: its step as it was predicted, and as it was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetsync.train.summary import PlanFigures

if TYPE_CHECKING:  # it loads what only plans need
    from hetsync.plan.assignment import Assignment


def plan_figures(assignment: Assignment, measured_step_seconds: float | None) -> PlanFigures:
    """`measured_step_seconds`: of `data.batch_size` samples; None where there was no step."""
    plan, costs = assignment.plan, assignment.costs
    return PlanFigures(
        path=str(plan.path),
        sha256=plan.sha256,
        replicas=[[list(stage.ranks) for stage in replica.stages] for replica in assignment.placement.replicas],
        predicted_step_seconds=costs.step_seconds,
        measured_step_seconds=measured_step_seconds,
        predicted_samples_per_second=costs.samples_per_second,
        bytes_per_sample=costs.bytes_per_sample,
        communication_fraction=assignment.communication_fraction,
    )


def predicted(assignment: Assignment) -> str:
    """A sentence for the job's beginning."""
    costs = assignment.costs
    return (
        f"plan {assignment.plan.path}: {costs.step_seconds:.4g} s a step are predicted,"
        f" {costs.samples_per_second:,.1f} samples/s"
    )


def compared(assignment: Assignment, measured_step_seconds: float) -> str:
    """A sentence for its end."""
    return f"a step took {measured_step_seconds:.4g} s; {assignment.costs.step_seconds:.4g} s were predicted"
