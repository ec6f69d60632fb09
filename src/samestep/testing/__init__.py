"""For tests: functions on several ranks, with a time limit and every rank's traceback."""

from samestep.testing.ranks import RanksFailed, free_port, run_ranks

__all__ = ["RanksFailed", "free_port", "run_ranks"]
