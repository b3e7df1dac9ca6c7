"""``python -m h5pack``, the same as ``h5pack``."""

import sys

from h5pack.cli import main

sys.exit(main())
