"""`python -m commfuse_fx`: the same as the command `commfuse`."""

from __future__ import annotations

import sys

from commfuse_fx.cli import main

if __name__ == "__main__":
    sys.exit(main())
