"""`zerohvd doctor`: is everything here that zerohvd needs, and does it work?

- probe.py       imports one framework's stack, in a process of its own
- probes.py      starts those processes at once and reads what they found, crashes included
- machine.py     cores and memory
- diagnosis.py   findings in, lines of the report out; knows the fixes
- rank_check.py  what each rank runs under `--run N`: every collective, every dtype
- run_check.py   starts those ranks and reads their results
- bandwidth.py   `--bandwidth`: latency and bandwidth of each collective, for `zerohvd plan`
- report.py      the lines, as a table for people and as JSON for machines
"""
