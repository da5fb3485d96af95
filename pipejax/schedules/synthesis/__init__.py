"""Synthesis: the order, and what to offload, that take the least time within a memory limit."""

from pipejax.schedules.synthesis.exact import prove as prove
from pipejax.schedules.synthesis.problem import Answer as Answer
from pipejax.schedules.synthesis.problem import Problem as Problem
from pipejax.schedules.synthesis.problem import lower_bound as lower_bound
from pipejax.schedules.synthesis.search import candidates as candidates
from pipejax.schedules.synthesis.search import named as named
from pipejax.schedules.synthesis.search import synthesize as synthesize
