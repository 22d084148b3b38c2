"""Building Horovod for the environment at hand.

`make_plan()` looks (and changes nothing), `install(plan)` acts:

    environment.py   what is here: frameworks, compiler, cmake, CPU, CUDA
    mpi.py           which MPI, and whether it works
    plan.py          a frozen Plan with its cache key, and how it reads
    cache.py         wheels under the user's cache folder: locked, written atomically
    steps.py         running long commands with progress, a log, and its tail when they fail
    build.py         sdist in, wheel out
    installer.py     the whole story, and the proof on two ranks
"""

from zerohvd.tools.builder.errors import BuilderError
from zerohvd.tools.builder.installer import install
from zerohvd.tools.builder.plan import Plan, make_plan

__all__ = ["BuilderError", "Plan", "install", "make_plan"]
