"""How fast a step is, against PyTorch's own ways to distribute and against no communication.

`python -m benchmarks.step` from the top folder; docs/benchmarks.md says how to read the figures.
"""
