"""Projects how long a compiled program takes: its schedule played on streams of compute, transfers and collectives.

The GPU runs kernels of the compute stream one after another; what is asynchronous starts when the compute stream
reaches its start and its own stream is free, and the compute stream waits at its end until it is done. The time waited
is exposed; the rest is hidden.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

from pipejax.aot import costs, reading
from pipejax.aot.hlo import Computation, Instruction, Module
from pipejax.aot.targets import Target


@dataclasses.dataclass(frozen=True)
class Phase:
    """What one section of the program is projected to take a step, all its trips together.

    Attributes:
      name: of the section's computation.
      trips: how often it runs; fractional where the data decide and the caller said so.
      seconds: the section's own time, loops within it included.
      transfer_seconds: time that its transfers between host and device take on their link.
      exposed_transfer_seconds: of those, what the compute stream waits for.
      exposed_collective_seconds: what it waits for collectives.
    """

    name: str
    trips: float
    seconds: float
    transfer_seconds: float
    exposed_transfer_seconds: float
    exposed_collective_seconds: float

    @property
    def hidden_fraction(self) -> float:
        """The share of transfer time that compute covers; 1 where there are no transfers."""
        return _hidden(self.exposed_transfer_seconds, self.transfer_seconds)


@dataclasses.dataclass(frozen=True)
class Projection:
    """Modelled, not measured: a step on one device. `assumptions` says what it rests on.

    Attributes:
      step_seconds: the step.
      flops: of matrix products and attention kernels that the device runs, recomputed ones included.
      transfer_seconds, exposed_transfer_seconds, exposed_collective_seconds: as in `Phase`, over all phases.
      phases: one per section of the program.
      assumptions: one sentence each.
    """

    step_seconds: float
    flops: float
    transfer_seconds: float
    exposed_transfer_seconds: float
    exposed_collective_seconds: float
    phases: tuple[Phase, ...]
    assumptions: tuple[str, ...]

    @property
    def hidden_fraction(self) -> float:
        """The share of transfer time that compute covers; 1 where there are no transfers."""
        return _hidden(self.exposed_transfer_seconds, self.transfer_seconds)


Trips = Mapping[str, float]


def project(module: Module, target: Target, *, devices: int, unknown_trips: Trips | None = None) -> Projection:
    """Plays a program's schedule on a target.

    Args:
      module: the compiled program.
      target: rates.
      devices: in the program's mesh; more than a node's mean the network.
      unknown_trips: how often, on average, loops run whose trip count only the data tell: from a part of the name that
        JAX gave the loop to a number. The first part that is found counts; where none is, a loop runs once.
    """
    clock = _Clock(module, target, devices, unknown_trips or {})
    clock.run(module.entry, 1.0)
    phases = tuple(
        Phase(
            name=name,
            trips=clock.trips[name],
            seconds=clock.seconds[name],
            transfer_seconds=clock.transfer[name],
            exposed_transfer_seconds=clock.exposed[name],
            exposed_collective_seconds=clock.collective[name],
        )
        for name in clock.trips
    )
    return Projection(
        step_seconds=clock.now,
        flops=clock.flops,
        transfer_seconds=sum(phase.transfer_seconds for phase in phases),
        exposed_transfer_seconds=sum(phase.exposed_transfer_seconds for phase in phases),
        exposed_collective_seconds=sum(phase.exposed_collective_seconds for phase in phases),
        phases=phases,
        assumptions=_assumptions(target, clock.guessed),
    )


class _Clock:
    """Time on the compute stream, when each other stream is free again, and what was waited for."""

    def __init__(self, module: Module, target: Target, devices: int, unknown_trips: Trips) -> None:
        self.module, self.target, self.devices, self.unknown_trips = module, target, devices, unknown_trips
        self.now = 0.0
        self.free: collections.defaultdict[str, float] = collections.defaultdict(float)
        self.ends: dict[int, tuple[float, bool]] = {}  # of what is under way, by its start's id: when, and what
        self.flops = 0.0
        self.guessed: dict[str, float] = {}
        self.trips: dict[str, float] = {}
        self.seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
        self.transfer: collections.defaultdict[str, float] = collections.defaultdict(float)
        self.exposed: collections.defaultdict[str, float] = collections.defaultdict(float)
        self.collective: collections.defaultdict[str, float] = collections.defaultdict(float)

    def run(self, computation: Computation, weight: float) -> None:
        """Plays one trip that stands for `weight` trips."""
        name = computation.name
        self.trips[name] = self.trips.get(name, 0.0) + weight
        began = self.now
        for instruction in computation.instructions:
            self._step(computation, instruction, weight)
        self.seconds[name] += (self.now - began) * weight

    def _step(self, computation: Computation, instruction: Instruction, weight: float) -> None:
        opcode = instruction.opcode
        if opcode == "while":
            self._loop(instruction, weight)
        elif opcode in ("call", "conditional"):
            for called in instruction.called:
                self.run(self.module.computations[called], weight)
        elif opcode.endswith("-done"):
            self._wait(computation, instruction, weight)
        elif reading.free(instruction):
            return
        elif collective := reading.collective(self.module, computation, instruction):
            seconds = costs.collective_seconds(collective, self.target, devices=self.devices)
            self._launch(computation, instruction, "collective", seconds, weight)
        elif moved := reading.transfer(computation, instruction):
            direction, arrays = moved
            crossings = 2 if direction == "h2h" else 1  # the GPU copies host memory, there and back
            seconds = crossings * sum(array.bytes for array in arrays) / self.target.pcie_rate
            self.transfer[computation.name] += seconds * weight
            stream = direction if self.target.pcie_duplex and crossings == 1 else "pcie"
            self._launch(computation, instruction, stream, seconds, weight)
        else:
            cost = costs.instruction_cost(self.module, computation, instruction)
            self.flops += cost.total_flops * weight
            self.now += cost.seconds(self.target)

    def _loop(self, loop: Instruction, weight: float) -> None:
        count = loop.trip_count
        trips = self._guess(loop.op_name) if count is None else float(count)
        body = self.module.body(loop)
        if trips < 1:
            # A share of a trip: all streams agree on the average.
            before = self.now
            self.run(body, weight * trips)
            self.now = before + (self.now - before) * trips
            for stream, end in self.free.items():
                self.free[stream] = before + (end - before) * trips if end > before else end
            return
        self.run(body, weight)
        if trips > 1:  # the second trip finds the streams as every later one does
            before = self.now
            self.run(body, weight * (trips - 1))
            self.now = before + (self.now - before) * (trips - 1)

    def _guess(self, name: str) -> float:
        part, trips = next(((part, n) for part, n in self.unknown_trips.items() if part in name), ("", 1.0))
        self.guessed[part] = trips
        return trips

    def _launch(
        self, computation: Computation, instruction: Instruction, stream: str, seconds: float, weight: float
    ) -> None:
        is_transfer = stream != "collective"
        end = max(self.now, self.free[stream]) + seconds
        self.free[stream] = end
        if instruction.opcode.endswith("-start"):
            self.ends[instruction.id] = end, is_transfer
        else:
            self._hold(computation, end, is_transfer, weight)

    def _wait(self, computation: Computation, done: Instruction, weight: float) -> None:
        started = self.ends.pop(done.operands[0], None)
        if started is not None:
            self._hold(computation, *started, weight)

    def _hold(self, computation: Computation, end: float, is_transfer: bool, weight: float) -> None:
        waited = max(0.0, end - self.now)
        counter = self.exposed if is_transfer else self.collective
        counter[computation.name] += waited * weight
        self.now += waited


def _hidden(exposed: float, total: float) -> float:
    return 1.0 - exposed / total if total > 0 else 1.0


def _assumptions(target: Target, guessed: Trips) -> tuple[str, ...]:
    giga, turns = 1e9, "both directions at once" if target.pcie_duplex else "the two directions in turns"
    found = [
        f"matrix products sustain {target.matmul_flops['bf16'] / 1e12:.0f} TFLOP/s in bf16",
        f"device memory sustains {target.hbm_rate / giga:.0f} GB/s",
        f"host and device exchange {target.pcie_rate / giga:.0f} GB/s in a direction, {turns} "
        f"(PCIe {target.pcie_generation}.0, {target.pcie_shared_by} GPUs at a switch)",
        f"GPUs of a node exchange {target.nvlink_rate / giga:.0f} GB/s in a direction, nodes of {target.node_gpus} "
        f"{target.network_rate / giga:.0f} GB/s for each GPU",
        f"a kernel takes {costs.LAUNCH_SECONDS * 1e6:.0f} us to launch",
        "attention kernels skip the half of the scores that a causal mask hides",
        "transfers and collectives take nothing from compute but the time waited for them",
    ]
    for part, trips in guessed.items():
        which = f"loops named ...{part}..." if part else "other loops"
        found.append(f"{which} whose trip count only the data tell run {trips:.3g} times")
    return tuple(found)
