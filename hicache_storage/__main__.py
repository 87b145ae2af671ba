"""`python -m hicache_storage` is the `hicache-storage` command."""

import sys

from .cli import main

sys.exit(main())
