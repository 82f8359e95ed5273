"""The command line with parts of so many bytes: python tests/small_parts.py BYTES prepare RUN.yaml --workers 2."""

import sys

from evenpack.data.prepare import source
from evenpack.launcher.cli.__main__ import main

if __name__ == "__main__":
    source.SMALLEST_PART_BYTES = int(sys.argv.pop(1))
    main()
