"""Build the documentation site into ``.cache/site``, and print figures of the prose of its pages.

``python -m tests.site PAGE`` prints the figures of some pages, with all their faults, and builds nothing.
"""

from __future__ import annotations

import os
import sys

from mkdocs.__main__ import cli

from tests.site.prose import pages, report


def main() -> int:
    wanted = sys.argv[1:]
    found = {
        page: prose for page, prose in pages().items() if not wanted or any(each in page for each in wanted)
    }
    print(*report(found), sep="\n")
    if wanted:
        return 0
    os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")
    return int(cli(["build", "--strict", "--quiet"], standalone_mode=False) or 0)


if __name__ == "__main__":
    sys.exit(main())
