"""`zerohvd plan`: where models come from, and how plans are shown.

- sources.py  a function, a checkpoint, a file or numbers, as a Workload
- table.py    a plan as a table for people
- plot.py     and as bars against the memory line
"""
