"""Measured times: traces and the speed of steps."""
