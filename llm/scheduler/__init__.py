"""Scheduling: queues, budgets, pages, priorities. No torch in this package."""

from llm.scheduler.admission import RequestRules, check_switches
from llm.scheduler.limits import SchedulerConfig, SchedulerLimits
from llm.scheduler.scheduler import Scheduler

__all__ = ["RequestRules", "Scheduler", "SchedulerConfig", "SchedulerLimits", "check_switches"]
