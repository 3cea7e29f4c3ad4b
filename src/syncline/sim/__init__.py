"""Time that is computed instead of waited for: the clock, the links, faults and jitter."""
