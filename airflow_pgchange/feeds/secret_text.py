"""How a secret may be written in a text: as it is, quoted, escaped, or several of these one around the other."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html.entities import codepoint2name

DEEPEST = 16
"""So many backslashes before a character are taken for escapes: four quotations one around the other."""
LETTERS = {"\n": "n", "\t": "t", "\r": "r", "\b": "b", "\f": "f"}
"""By which JSON and Python escape a control character, behind a backslash."""


BACKSLASH = r"(?i:\\|%(?:25){0,3}5c|&#92;|&#x5c;)"
RUN_BEGINS = r"(?<!\\)(?<!%5c)(?<!%5C)"
ESCAPED = BACKSLASH + rf"{{1,{DEEPEST}}}"


def any_of(secrets: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern for each of these secrets, however it is written; None where there are none."""
    known = sorted({secret for secret in secrets if secret}, key=len, reverse=True)
    # As it is in any case, also where it looks like something escaped.
    patterns = [f"{re.escape(secret)}|{_written(secret)}" for secret in known]
    return re.compile("|".join(patterns)) if patterns else None


def _written(secret: str) -> str:
    """A pattern of characters with backslashes before them: those of the secret, and those that escape."""
    parts: list[str] = []
    for run, character in re.findall(r"(\\*)([^\\]?)", secret, re.DOTALL):
        if run or (parts and not _is_plain(character)):
            # Bounded, and at the beginning of a run only, as a text may have millions of backslashes in a row.
            parts += [] if parts else [RUN_BEGINS]
            parts.append(BACKSLASH + f"{{{len(run)},{DEEPEST * max(1, len(run))}}}")
        parts.append(_character(character))
    return "".join(parts)


def _is_plain(character: str) -> bool:
    """Whether no notation escapes a character."""
    return not character or (character.isascii() and character.isalnum())


def _character(character: str) -> str:
    """A character as it is, or as some notation has it behind the backslash that is matched before."""
    if _is_plain(character):
        return character
    code, encoded = ord(character), character.encode("utf-8", "surrogatepass")
    utf_16 = character.encode("utf-16-be", "surrogatepass")
    numbers = [
        "".join(f"%(?:25){{0,3}}{byte:02x}" for byte in encoded),
        ESCAPED.join(f"x{byte:02x}" for byte in encoded),
        ESCAPED.join(f"u{utf_16[at : at + 2].hex()}" for at in range(0, len(utf_16), 2)),
        f"x{code:02x}",
        f"u{code:08x}",
        f"&#0*{code};",
        f"&#x0*{code:x};",
    ]
    ways = [re.escape(character), f"(?i:{'|'.join(numbers)})"]
    if character in LETTERS:
        ways.append(LETTERS[character])
    if character == " ":
        ways.append(r"\+|(?i:%(?:25){0,3}2b)")
    if character in "'\"":
        # Doubled in SQL and CSV. In a shell the quotation ends before an apostrophe, which is quoted otherwise.
        ways[:0] = [re.escape("'\"'\"'"), character * 2]
    if code in codepoint2name:
        ways.append(f"&{codepoint2name[code]};")
    return f"(?:{'|'.join(ways)})"
