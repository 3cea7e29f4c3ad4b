"""Simulation: all ranks of a job in one process, on the virtual clock."""
