"""The report: one HTML file about runs, traces and comparisons (docs/report.md).

`write.write_report(paths, out)` writes it.
"""
