"""Decisions: from plans and devices to plans. Pure Python.

May import layout and errors only, so that a process without torch decides at once.
"""

from uneven.planner.repartition import repartition

__all__ = ["repartition"]
