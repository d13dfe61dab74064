"""`python -m attn_dispatch`: the command `attn-dispatch`."""

import sys

from attn_dispatch.cli import main

sys.exit(main())
