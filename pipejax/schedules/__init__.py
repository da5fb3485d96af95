"""Schedules: which pass each device runs when, as data. Python and NumPy only."""

from pipejax.schedules.check import ScheduleError as ScheduleError
from pipejax.schedules.check import check as check
from pipejax.schedules.lockstep import GPipe as GPipe
from pipejax.schedules.lockstep import Interleaved as Interleaved
from pipejax.schedules.lockstep import OneFOneB as OneFOneB
from pipejax.schedules.names import NAMES as NAMES
from pipejax.schedules.names import by_name as by_name
from pipejax.schedules.schedule import Kind as Kind
from pipejax.schedules.schedule import Placement as Placement
from pipejax.schedules.schedule import Schedule as Schedule
from pipejax.schedules.schedule import ScheduleSpec as ScheduleSpec
