"""Memory and time before the run: what a rank will hold, what a step will move, how long it takes.

- sizes.py      "16GiB", "7.5e9", "8,16,64": what people write
- workload.py   what is trained, as an adapter or a few numbers describe it
- timeline.py   activations and gradients over one micro-step, as they were measured
- footprint.py  bytes per rank by kind, and the peak of a step
- network.py    what a collective costs
- traffic.py    the collectives of a step
- plan.py       all of it for several stages and numbers of ranks, and what to choose
"""
