"""Proves a program by running it on names: every slot holds the pass that its reader wants when it is read.

Independent of how slots were assigned: it walks the phases as the runtime does and keeps, for each buffer of each
device, what was stored last.
"""

from __future__ import annotations

from typing import Any

from pipejax.program import COLUMNS, WAYS, Program, ProgramError
from pipejax.schedules.schedule import Kind

_Slots = dict[tuple[str, int, int], Any]  # (buffer, device, slot) -> the pass that wrote it


def check_program(program: Program) -> None:
    """Checks every read of every device and tick.

    Raises:
      ProgramError: a slot is read before it is written or after it is reused, or a pass is missing; names device,
        tick and pass.
    """
    (_StaggeredWalk if program.predicated else _WalkInParts if program.parts else _Walk)(program).run()


class _Walk:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.stage = program.schedule.placement.stage
        self.slots: _Slots = {}
        self.out: dict[int, tuple[int, Any]] = {}  # to be written to the host: slot and pass, by device
        self.arrived: dict[int, Any] = {}  # read from the host for the next B
        self.done: set[tuple[Kind, int, int]] = set()
        self.columns = {name: program.column(name) for name in COLUMNS}

    def run(self) -> None:
        for phase in self.program.phases:
            if phase.flush:
                self._write()
            if phase.backward and not phase.forward:
                self._read("host_load", phase.start)
            for tick in range(phase.start, phase.stop):
                self._tick(tick, forward=phase.forward, backward=phase.backward)
        schedule = self.program.schedule
        kinds = {kind for kind, _, _ in self.done}
        if len(self.done) != len(kinds) * schedule.devices * schedule.chunks * schedule.microbatches:
            raise ProgramError("a pass is missing from the program's phases.")

    def _at(self, column: str, device: int, tick: int) -> int:
        return int(self.columns[column][device, tick])

    def _write(self) -> None:
        for device, (slot, unit) in self.out.items():
            self.slots["host", device, slot] = unit
        self.out = {}

    def _read(self, column: str, tick: int) -> None:
        for device in range(self.program.schedule.devices):
            self.arrived[device] = self.slots.get(("host", device, self._at(column, device, tick)))

    def _tick(self, tick: int, *, forward: bool, backward: bool) -> None:
        program = self.program
        devices = program.schedule.devices
        last = devices * program.schedule.chunks - 1
        if program.offload and not backward:
            self._write()
        if program.offload and forward and backward:
            self._read("host_load", tick)
        arrived = dict(self.arrived)
        sent: dict[Kind, dict[int, Any]] = {Kind.F: {}, Kind.B: {}}
        heads: dict[int, Any] = {}
        for device in range(devices if forward else 0):
            stage = int(self.stage[device, self._at("f_chunk", device, tick)])
            unit = (stage, self._at("f_microbatch", device, tick))
            valid = bool(self._at("f_valid", device, tick))
            if valid and stage > 0:
                self._expect("x", device, tick, "f_source", (stage - 1, unit[1]))
            self.slots["kept", device, self._at("f_store", device, tick)] = unit if valid else None
            sent[Kind.F][device] = unit if valid else None
            self.out[device] = self._at("host_write", device, tick), sent[Kind.F][device]
            if valid:
                self.done.add((Kind.F, *unit))
            if bool(self._at("f_head", device, tick)) != (valid and stage == last):
                raise ProgramError(f"device {device}, tick {tick}: the head runs where F is not of the last stage.")
            if valid and stage == last:
                heads[device] = (stage + 1, unit[1])
        if program.offload and backward:
            self.arrived = {}
            if forward:
                self._write()
        for device in range(devices if backward else 0):
            stage = int(self.stage[device, self._at("b_chunk", device, tick)])
            unit = (stage, self._at("b_microbatch", device, tick))
            valid = bool(self._at("b_valid", device, tick))
            if valid:
                self._expect("dy", device, tick, "b_source", (stage + 1, unit[1]))
                self._expect("kept", device, tick, "b_load", unit)
                if program.offload and program.layers > 1:
                    self._expect("host", device, tick, "host_load", unit)
                if program.offload and arrived.get(device) != unit:
                    raise ProgramError(
                        f"device {device}, tick {tick}: B of stage {stage}, microbatch {unit[1]} finds residuals of "
                        f"{arrived.get(device)} read from the host."
                    )
                self.done.add((Kind.B, *unit))
            sent[Kind.B][device] = unit if valid else None
        if program.offload and backward and not forward:
            self._read("host_next", tick)
        for device, unit in heads.items():
            self.slots["dy", device, self._at("head_store", device, tick)] = unit
        self._send(sent, tick, forward=forward, backward=backward)

    def _send(self, sent: dict[Kind, dict[int, Any]], tick: int, *, forward: bool, backward: bool) -> None:
        program = self.program
        devices = program.schedule.devices
        for device in range(devices):
            for way in program.forward_ways if forward else ():
                slot = self._at(f"f_from_{WAYS[way]}", device, tick)
                self.slots["x", device, slot] = sent[Kind.F].get((device - way) % devices)
            for way in program.backward_ways if backward else ():
                slot = self._at(f"b_from_{WAYS[way]}", device, tick)
                self.slots["dy", device, slot] = sent[Kind.B].get((device - way) % devices)

    def _expect(self, buffer: str, device: int, tick: int, column: str, wanted: tuple[int, int]) -> None:
        slot = self._at(column, device, tick)
        found = self.slots.get((buffer, device, slot))
        if found != wanted:
            raise ProgramError(
                f"device {device}, tick {tick}: {buffer} slot {slot} should hold stage {wanted[0]}, microbatch "
                f"{wanted[1]}, and holds {found}: it is read before it is written or after it is reused."
            )


class _StaggeredWalk(_Walk):
    """Slots of residuals hold a pass whose parts are here or not: (pass, the parts that are)."""

    kinds = 3

    def run(self) -> None:
        for phase in self.program.phases:
            for tick in range(phase.start, phase.stop):
                sent: dict[Kind, dict[int, Any]] = {Kind.F: {}, Kind.B: {}}
                for device in range(self.program.schedule.devices):
                    self._device(device, tick, sent)
                self._send(sent, tick, forward=phase.forward, backward=phase.backward)
        schedule = self.program.schedule
        if len(self.done) != self.kinds * schedule.devices * schedule.chunks * schedule.microbatches:
            raise ProgramError("a pass is missing from the program.")

    def _device(self, device: int, tick: int, sent: dict[Kind, dict[int, Any]]) -> None:
        last = self.program.schedule.placement.stages - 1
        due = {letter: self._pass(letter, device, tick) for letter in "fbw"}
        # What a pass takes it takes at the start, before anything moves.
        if unit := due["f"]:
            if unit[0] > 0:
                self._expect("x", device, tick, "f_source", (unit[0] - 1, unit[1]))
            self.done.add((Kind.F, *unit))
            sent[Kind.F][device] = unit
        if unit := due["b"]:
            self._expect("dy", device, tick, "b_source", (unit[0] + 1, unit[1]))
            self._expect("kept", device, tick, "b_load", unit)
            self._expect_whole(device, tick, "b_move", unit)
            self.slots["stash", device, self._at("stash_store", device, tick)] = unit
            self.done.add((Kind.B, *unit))
            sent[Kind.B][device] = unit
        if unit := due["w"]:
            self._expect("kept", device, tick, "w_load", unit)
            self._expect_whole(device, tick, "w_move", unit)
            if self.program.schedule.split_backward:
                self._expect("stash", device, tick, "w_stash", unit)
            self.done.add((Kind.W, *unit))
        if self.program.offload:
            self._move(device, tick)
        if unit := due["f"]:
            self._store(device, tick, unit)
            if unit[0] == last:
                self.slots["dy", device, self._at("head_store", device, tick)] = (unit[0] + 1, unit[1])

    def _store(self, device: int, tick: int, unit: tuple[int, int] | None) -> None:
        self.slots["kept", device, self._at("f_store", device, tick)] = unit
        self.slots["moving", device, self._at("f_move", device, tick)] = unit, frozenset(range(self.program.parts))

    def _pass(self, letter: str, device: int, tick: int) -> tuple[int, int] | None:
        if not self._at(f"{letter}_valid", device, tick):
            return None
        stage = int(self.stage[device, self._at(f"{letter}_chunk", device, tick)])
        return stage, self._at(f"{letter}_microbatch", device, tick)

    def _move(self, device: int, tick: int) -> None:
        """A part comes, then one goes."""
        part = self._at("in_part", device, tick)
        if self._at("in_valid", device, tick):
            source = "host", device, self._at("in_load", device, tick)
            self._add_part(("moving", device, self._at("in_store", device, tick)), self._part_of(source, part), part)
        part = self._at("out_part", device, tick)
        source = "moving", device, self._at("out_load", device, tick)
        self._add_part(("host", device, self._at("out_store", device, tick)), self._part_of(source, part), part)

    def _part_of(self, place: tuple[str, int, int], part: int) -> Any:
        unit, there = self.slots.get(place) or (None, frozenset())
        return unit if part in there else None

    def _add_part(self, place: tuple[str, int, int], unit: Any, part: int) -> None:
        before, there = self.slots.get(place) or (None, frozenset())
        self.slots[place] = unit, (there if before == unit else frozenset()) | {part}

    def _expect_whole(self, device: int, tick: int, column: str, unit: tuple[int, int]) -> None:
        if not self.program.offload:
            return
        slot = self._at(column, device, tick)
        found, there = self.slots.get(("moving", device, slot)) or (None, frozenset())
        if found != unit or len(there) != self.program.parts:
            raise ProgramError(
                f"device {device}, tick {tick}: moving slot {slot} should hold stage {unit[0]}, microbatch {unit[1]}, "
                f"and holds {len(there)} of {self.program.parts} parts of {found}."
            )


class _WalkInParts(_StaggeredWalk):
    """In a lockstep tick F stores its residuals, garbage too, then parts move, then B takes its own."""

    kinds = 2

    def _device(self, device: int, tick: int, sent: dict[Kind, dict[int, Any]]) -> None:
        last = self.program.schedule.placement.stages - 1
        f, b = (self._pass(letter, device, tick) for letter in "fb")
        if f:
            if f[0] > 0:
                self._expect("x", device, tick, "f_source", (f[0] - 1, f[1]))
            self.done.add((Kind.F, *f))
            sent[Kind.F][device] = f
        if any(phase.forward and phase.start <= tick < phase.stop for phase in self.program.phases):
            self._store(device, tick, f)
        self._move(device, tick)
        if b:
            self._expect("dy", device, tick, "b_source", (b[0] + 1, b[1]))
            self._expect("kept", device, tick, "b_load", b)
            self._expect_whole(device, tick, "b_move", b)
            self.done.add((Kind.B, *b))
            sent[Kind.B][device] = b
        if f and f[0] == last:
            self.slots["dy", device, self._at("head_store", device, tick)] = (f[0] + 1, f[1])
