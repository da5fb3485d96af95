"""Pictures of schedules: for a terminal, for a page (SVG), for Perfetto."""

from pipejax.schedules.draw.svg import svg as svg
