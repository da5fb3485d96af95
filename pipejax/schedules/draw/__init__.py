"""Pictures of schedules: for a terminal, for a page (SVG), for Perfetto."""

from pipejax.schedules.draw.svg import svg as svg
from pipejax.schedules.draw.text import text as text
from pipejax.schedules.draw.trace import trace as trace
