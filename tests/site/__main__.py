"""Build the documentation site into ``.cache/site``, and print figures of the prose of its pages.

``python -m tests.site PAGE`` prints the figures of some pages, with all their faults, and builds nothing.
"""

from __future__ import annotations

import os
import sys

from click import ClickException
from mkdocs.__main__ import cli

from tests.readme import ROOT
from tests.site.prose import pages, report

SITE = ROOT / ".cache" / "site"


def main() -> int:
    wanted = sys.argv[1:]
    found = {
        page: prose for page, prose in pages().items() if not wanted or any(each in page for each in wanted)
    }
    print(*report(found), sep="\n")
    if wanted:
        return 0
    os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")
    # With --quiet, warnings would not count as errors.
    try:
        cli(["build", "--strict"], standalone_mode=False)
    except ClickException as error:
        error.show()
        return 1
    print(f"open {SITE / 'index.html'}, or with its search: python -m http.server --directory {SITE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
