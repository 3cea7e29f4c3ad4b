"""The command line: one file per verb. Checks a job without importing torch, then starts ranks."""
