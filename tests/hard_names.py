"""Names that PostgreSQL accepts, and that other programs often handle wrongly."""

from __future__ import annotations

HARD = [
    "a`b", "`", "``", "a\"b", "a'b", "a.b", ".", "a`.`b", "a b", " ", "100%", "%s", "%(x)s", "%%", "back\\slash", "a[0]",
    "a{b}", "{}", "{0}", "$1", "$$", "é日本😀", "1st", "42", "select", "*", "a.*", "a,b", "a;b", "--", "/*", "a: b",
    "new\nline", "tab\t", "x" * 63, "é" * 31, "#", "@", "?", ":x", "a->>'b'", "a::text", "null", "true", "UPPER", "id`",
]  # fmt: skip
