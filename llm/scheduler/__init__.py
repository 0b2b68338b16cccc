"""Scheduling: queues, budgets, pages, priorities. No torch in this package."""

from llm.scheduler.limits import SchedulerConfig, SchedulerLimits
from llm.scheduler.scheduler import Scheduler

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerLimits"]
