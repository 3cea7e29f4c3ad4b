"""What people see: progress while a run goes on, the result when it is over."""
