"""`python -m zerohvd`: the same as the `zerohvd` command."""

import sys

from zerohvd.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
