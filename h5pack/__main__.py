"""Entry point of ``python -m h5pack``, which does the same as the command ``h5pack``."""

import sys

from h5pack.cli import main

sys.exit(main())
