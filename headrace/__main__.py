"""`python -m headrace`, for where the console command is not on the PATH."""

from __future__ import annotations

import sys

from headrace import main

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # `-m` put the working directory first, where a user's `yaml/` would win over the library.
        del sys.path[0]
    main()
