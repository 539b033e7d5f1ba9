"""`launch.py check --nodes N`: what each of several nodes like a machine takes of a job, and what
is sent between their GPUs and over the network in a step.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.config.settings import TrainConfig
from engine.errors import ConfigError
from engine.machine.device import rates_of
from engine.machine.link_rates import ASSUMED_NETWORK
from engine.machine.rates import Rates
from engine.machine.read_machine import Machine
from engine.model.build.find_shape import adapted_shape
from engine.model.build.shape_of_run import shape_of_run
from engine.planning.fit.collectives import CollectiveTimes
from engine.planning.fit.report import estimate
from engine.planning.fit.requirements import FitStatus, Requirements, SessionFacts, requirements_of
from engine.planning.fit.simulate_step import predicted_step
from engine.planning.schedule.ops import Lane
from engine.planning.shape.model_shape import ModelShape
from engine.text import in_gb, in_seconds
from engine.tools.cli.check_report import report_as_text


@dataclass(frozen=True)
class Between:
    """Traffic between the ranks in a step, in bytes, and what that takes, in seconds."""

    received_by_gpu: int
    """Bytes that each GPU receives of those that have other shards of the same planes."""
    received_by_node: float
    """Bytes that come to each node over the network; as many leave it."""
    network: float
    """Bytes per second that a node receives."""
    collective_seconds: float
    """Seconds in which the lane COLLECTIVE is busy."""
    compute_waits: float
    """Seconds that the lane COMPUTE waits, for any cause."""


def check_nodes(
    config: TrainConfig, machine: Machine, facts: SessionFacts, as_json: bool
) -> tuple[str, int]:
    """Returns the report as text or JSON, and the exit code: 1 when the job does not fit. facts:
    the number of nodes, and the rate of the network between them. Raises RamstreamError for bad
    input.
    """
    if facts.nodes < 2:
        raise ConfigError("--network-gbits", "one node has no network; add --nodes.")
    shape = shape_of_run(config)
    report = estimate(config, machine, shape, facts, adapted_shape)
    shape = shape.with_optimizer(config.train.optimizer)
    rates = rates_of(config, machine)
    between = None
    if report.status != FitStatus.DOES_NOT_FIT and rates is not None:
        rates = replace(rates, network=facts.network or rates.network)
        between = _between(requirements_of(config, machine, shape, facts), shape, rates)
    if as_json:
        found = {"machine": machine.to_dict(), "nodes": facts.nodes}
        found["between"] = None if between is None else asdict(between)
        text = json.dumps(report.to_dict() | found, indent=2)
    else:
        lines = [] if between is None else _between_text(between, report.choices)
        text = "\n".join([report_as_text(report, machine), *lines])
    return text, 1 if report.status == FitStatus.DOES_NOT_FIT else 0


def _between(requirements: Requirements, shape: ModelShape, rates: Rates) -> Between:
    """Returns the traffic between the ranks in a step of the plan that was found."""
    choices = requirements.chosen.choices
    plan, timing = predicted_step(
        shape, choices, rates, requirements.micro_batch, requirements.device
    )
    numels = {unit.name: (unit.numel, unit.weight_numel) for unit in shape.units}
    times = CollectiveTimes(plan, numels, shape.item_bytes, rates)
    received = sum(map(times.received, plan.ops))
    by_node = (
        float(received)
        if choices.sharding.nodes_per_replica > 1
        else sum(map(times.between_nodes, plan.ops))
    )
    return Between(
        received,
        by_node,
        rates.network or ASSUMED_NETWORK,
        timing.busy[Lane.COLLECTIVE],
        timing.exposed,
    )


def _between_text(between: Between, choices: dict[str, Any]) -> list[str]:
    whose = "of the others on its node"
    what = "gradients"
    if choices["nodes_per_replica"] > 1:
        whose, what = "of all others", "weights and gradients"
    return [
        "",
        "Between GPUs and nodes, in a step",
        f"  each GPU receives {in_gb(between.received_by_gpu)} {whose}",
        f"  each node receives {in_gb(between.received_by_node)} of {what} over the "
        f"network, at {8 * between.network / 1e9:,.3g} Gbit/s",
        f"  exchanges take {in_seconds(between.collective_seconds)}, beside computing; COMPUTE "
        "waits "
        f"for {in_seconds(between.compute_waits)}",
    ]
