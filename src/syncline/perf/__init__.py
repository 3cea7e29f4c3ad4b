"""Time: what was done when."""
