"""Pictures: well-formed, everything in them, legible however many devices."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest

from pipejax.schedules import Link, by_name, draw, plan, simulate

SVG = "{http://www.w3.org/2000/svg}"


def timeline(name="po-h", devices=4, microbatches=8):
    schedule = by_name(name).build(devices=devices, microbatches=microbatches)
    return plan(simulate(schedule), Link(k=1), chunks=schedule.offload_chunks)


def size(svg):
    root = ET.fromstring(svg)
    return float(root.get("width")), float(root.get("height"))


def test_svg_names_every_pass_and_transfer():
    drawn = timeline()
    root = ET.fromstring(draw.svg(drawn))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    passes = [text for text in texts if text and re.fullmatch(r"\d+", text)]
    assert len(passes) >= len(drawn.schedule.passes)
    moved = [text for text in texts if text and re.fullmatch(r"\d+\.\d+", text)]
    assert sorted(moved) == sorted(f"{row['microbatch']}.{row['chunk']}" for row in drawn.transfers)
    assert sum(text.startswith("peak ") for text in texts if text) == 4
    assert any("bubble 9" in text for text in texts if text)


@pytest.mark.parametrize(("devices", "microbatches"), [(1, 1), (2, 3), (32, 64)])
def test_svg_keeps_a_screens_shape(devices, microbatches):
    width, height = size(draw.svg(timeline("po-f", devices, microbatches)))
    assert 700 <= width <= 4200
    assert height <= 1.2 * width


def test_svg_labels_of_many_devices_stay_readable():
    svg = draw.svg(timeline("po-f", 32, 64))
    width, _ = size(svg)
    sizes = [float(x) for x in re.findall(r'font-size="([\d.]+)" text-anchor="end">31<', svg)]
    assert sizes, "device 31 has no label"
    assert sizes[0] * 1500 / width >= 9  # px where the picture is 1500 px wide


def test_a_schedule_is_drawn_as_it_is():
    schedule = by_name("lockstep-interleaved").build(devices=4, microbatches=8)
    assert "lockstep-interleaved" in draw.svg(schedule)
    assert "lockstep-interleaved" in draw.text(schedule)
    assert "transfers" not in draw.svg(schedule)


@pytest.mark.parametrize("colour", [True, False])
def test_text_has_a_line_for_all_of_each_device(colour):
    drawn = draw.text(timeline(), width=400, colour=colour)
    plain = re.sub(r"\x1b\[[\d;]*m", "", drawn)
    assert (plain != drawn) == colour
    lines = plain.splitlines()
    for head in ("dev ", "   host ", " memory "):
        assert sum(line.startswith(head) for line in lines) == 4
    row = next(line for line in lines if line.startswith("dev 0"))
    if not colour:
        assert re.findall(r"[FBW]\d\.\d", row)[:4] == ["F0.0", "F1.0", "F0.1", "F2.0"]


def test_text_fits_a_narrow_terminal():
    plain = re.sub(r"\x1b\[[\d;]*m", "", draw.text(timeline("gis", 4, 32), width=100))
    assert max(len(line) for line in plain.splitlines()[2:]) <= 110


def test_trace_is_what_perfetto_reads():
    drawn = timeline()
    events = json.loads(draw.trace(drawn))["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(drawn.schedule.passes) + len(drawn.transfers)
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in complete)
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"device 0", "compute", "transfers"} <= names
    counters = [event["args"]["chunks"] for event in events if event["ph"] == "C" and event["pid"] == 0]
    assert max(counters) >= drawn.peaks()[0]
