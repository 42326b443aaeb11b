"""`make mutants`: small faults put into a copy of the code, and whether the tests notice them.

`changes.py` finds and chooses faults of Python, `native.py` has a table of those of C++. `trial_copy.py` makes a copy
of the tree that holds all of them, each behind a switch. One run of the tests finds who meets which fault; a second
process collects the tests once and forks for each fault (`plugin.py`). `floor.json`
lists the faults that must be noticed.
"""
