"""The examples of the README and of the guides."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def blocks(language: str, page: str = "README.md") -> list[str]:
    text = (ROOT / page).read_text()
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
    return found
