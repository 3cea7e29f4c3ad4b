"""The engine: a model on one rank, its two lanes, and the steps that drive a strategy."""
