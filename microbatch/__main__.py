"""``python -m microbatch`` is the command ``microbatch``."""

from __future__ import annotations

import sys

from microbatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
