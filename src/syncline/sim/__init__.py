"""Runs on the virtual clock: a workload's compute lanes, the learner's arithmetic, the result."""
