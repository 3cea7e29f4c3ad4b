"""What is printed: progress during a run, and its result."""
