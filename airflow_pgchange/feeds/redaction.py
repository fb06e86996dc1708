"""Find a secret in a text in any notation: as it is, quoted, escaped, or several of these nested."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html.entities import codepoint2name

DEEPEST = 16
"""Up to this number of backslashes before a character count as escapes, which is four nested quotations."""
LETTERS = {"\n": "n", "\t": "t", "\r": "r", "\b": "b", "\f": "f"}
"""The letters that stand for a control character after a backslash, in JSON and Python."""


BACKSLASH = r"(?i:\\|%(?:25){0,3}5c|&#92;|&#x5c;)"
RUN_BEGINS = r"(?<!\\)(?<!%5c)(?<!%5C)"
ESCAPED = BACKSLASH + rf"{{1,{DEEPEST}}}"


def any_of(secrets: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches each of these secrets in any notation; None if there are no secrets."""
    longest_first = sorted({secret for secret in secrets if secret}, key=len, reverse=True)
    # Always match the secret as it is, too, because it may itself look like an escaped text.
    patterns = [f"{re.escape(secret)}|{_written(secret)}" for secret in longest_first]
    return re.compile("|".join(patterns)) if patterns else None


def _written(secret: str) -> str:
    """Return a pattern for the secret, whose characters may have further backslashes before them."""
    parts: list[str] = []
    for run, character in re.findall(r"(\\*)([^\\]?)", secret, re.DOTALL):
        if run or (parts and not _is_plain(character)):
            # A text may have millions of backslashes in a row. So bound their number, and begin a match at the start of a
            # run only.
            parts += [] if parts else [RUN_BEGINS]
            parts.append(BACKSLASH + f"{{{len(run)},{DEEPEST * max(1, len(run))}}}")
        parts.append(_character(character))
    return "".join(parts)


def _is_plain(character: str) -> bool:
    """Whether no notation escapes a character."""
    return not character or (character.isascii() and character.isalnum())


def _character(character: str) -> str:
    """Return a pattern for a character as it is, or as a notation writes it after the backslash."""
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
        # SQL and CSV double a quote. A shell ends the quotation before an apostrophe, and quotes that separately.
        ways[:0] = [re.escape("'\"'\"'"), character * 2]
    if code in codepoint2name:
        ways.append(f"&{codepoint2name[code]};")
    return f"(?:{'|'.join(ways)})"
