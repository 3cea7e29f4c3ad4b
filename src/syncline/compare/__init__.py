"""Comparing strategies: a grid of runs, what each found, and who is first at which number of ranks.

study.py       what is compared, as a TOML file has it
grid.py        from a study to cells: single runs, each with its job
cell.py        a cell's file
running.py     one cell run, on the virtual clock or for real
pool.py        many cells run, each in a process of its own
tuning.py      the settings that a search tries, and which one it takes
curves.py      time to a target; spread over seeds; what can be told apart
tables.py      the numbers of a comparison: summary.json
folder.py      the folder of a comparison, and the whole of it from start to end
"""
