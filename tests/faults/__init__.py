"""Faults at random moments of real runs: what `scripts/fault_campaign` tries, and the tests of it.

subject.py     a small run, the ways to start it, and what an undisturbed one leaves
life.py        one start of it: its processes, its steps, how it ends
running.py     faults of a run that is on: signals, full disks, a second run, files that vanish
at_rest.py     faults between two starts: each kind of file truncated, changed by a bit, or deleted
preparing.py   faults of `evenpack prepare`, with and without workers and the grid shuffle
traces.py      what a run leaves beside its files: shared memory, ports, temporary files, processes
disks.py       small disks that can be filled
tried.py       a fault that was tried, and what is promised
converting.py  kills while a checkpoint is converted for other ranks
campaign.py    draws them, judges them, and compares every run that has had some with the undisturbed one
report.py      adds campaigns up
"""
