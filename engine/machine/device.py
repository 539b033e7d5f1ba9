"""The device of a machine on which a job computes, the memory of it that a run may take, and the
rates of the machine. No torch.
"""

from __future__ import annotations

from dataclasses import replace

from engine.config.settings import TrainConfig
from engine.errors import ConfigError
from engine.machine.findings import Finding, without_gpu
from engine.machine.known_machines import known_machine
from engine.machine.rates import Rates, stored_rates
from engine.machine.read_machine import Machine
from engine.machine.several_gpus import link_of, rates_with_link


def device_of(config: TrainConfig, machine: Machine) -> str:
    """Returns `cpu` or `cuda`. Raises ConfigError where a GPU is requested and the machine has
    none.
    """
    if config.engine.device == "cuda" and not machine.gpus:
        raise ConfigError(
            "engine.device",
            "cuda is asked for but this machine has no CUDA GPU; choose auto or cpu.",
        )
    return "cuda" if machine.gpus and config.engine.device != "cpu" else "cpu"


def refuse_unasked_cpu(config: TrainConfig, machine: Machine) -> None:
    """Raises ConfigError where the machine has a GPU that a run would not use, unless the settings
    ask for the CPU.
    """
    found = without_gpu(machine.findings)
    if found is not None and config.engine.device != "cpu":
        raise unasked_cpu(found)


def unasked_cpu(found: Finding) -> ConfigError:
    """Returns the error of a run that would compute on the CPU, for what was found, unasked."""
    return ConfigError(
        "engine.device",
        f"{found.sentence} To train on the CPU all the same: `--set engine.device=cpu`",
    )


def gpu_count(config: TrainConfig, machine: Machine) -> int:
    """Returns how many GPUs a run can compute on; 0 where it computes on the CPU."""
    return len(machine.gpus) if device_of(config, machine) == "cuda" else 0


def gpu_limit(config: TrainConfig, machine: Machine, ranks: int) -> int | None:
    """Returns the bytes that the run may take of the memory of each GPU; None on the CPU."""
    if device_of(config, machine) == "cpu":
        return None
    return config.engine.within_cap(min(gpu.free for gpu in machine.gpus[:ranks]))


def measured_rates(config: TrainConfig, machine: Machine) -> Rates | None:
    """Returns the stored rates that were measured on this machine. A machine that is only estimated
    has none.
    """
    here = device_of(config, machine) == "cuda" and machine.here
    return stored_rates(machine.gpus[0].name) if here else None


def rates_of(config: TrainConfig, machine: Machine) -> Rates | None:
    """Returns measured rates, or else rates that are estimated from the card's specification.
    Returns None for an unknown card, and on the CPU. The link between several GPUs is estimated.
    """
    if device_of(config, machine) == "cpu":
        return None
    measured = measured_rates(config, machine)
    return rates_with_link(machine) if measured is None else with_link(measured, machine)


def with_link(rates: Rates, machine: Machine) -> Rates:
    """Returns measured rates with an estimate for the link between several GPUs, where it was not
    measured.
    """
    if rates.link or len(machine.gpus) < 2:
        return rates
    return replace(rates, link=link_of(known_machine(machine)).bandwidth)
