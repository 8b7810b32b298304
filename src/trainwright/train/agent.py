"""torchrun, tied to the process that starts it: when that one is killed, so are this and the ranks."""

from __future__ import annotations

import sys

from .parent import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    from torch.distributed.run import main

    main(sys.argv[1:])
