"""Check that the texts in the code are plain English: docstrings, comments, errors, log lines and help.

``python -m tests.prose`` prints figures for each folder, ``python -m tests.prose FOLDER`` also the texts to rewrite, and
``python -m tests.prose --lint`` fails if a folder of ``CLEAN`` exceeds the limits. CONTRIBUTING.md states the rules.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from pathlib import Path

from tests.suite.parsing import syntax

ROOT = Path(__file__).parents[1]
SOURCES = ("airflow_pgchange", "dags", "demo", "scripts", "sql", "tests")
CLEAN = ("airflow_pgchange", "dags", "demo", "sql", "tests")
"""Folders that ``make lint`` holds to the limits. A folder that has been rewritten is added here, until all are."""
LIMIT = 0.005
"""Largest share of texts without a noun for a subject, and of texts with two marks: five times the share in psycopg."""
LONGEST = 25
"""Words of a sentence."""

MARKS = {
    "headless": r"\A\W*(?:(?:and|but|or) )?(?:what|who|whoever|whatever)\b(?!.*\?$)",
    "inside": r"\b(?:of|for|by|to|from|with|in|on|than) (?:what|who|whom)(?:ever)?\b|, who(?:ever)?\b",
    "one": r"(?<!least )(?<!most )(?<!than )(?<!exactly )(?<!zero or )(?<!no )(?<!by )"
    r"\bone(?=[,.;:)?!]|$| (?:that|which|who|whose|is|are|was|has|had|can|cannot|may|must|will|would|does|did|do"
    r"|in|on|at|for|from|to|with|without|and|or|but|as|than|if|when|where|while|because|until|before|it|they|the|a"
    r"|here|there|not|also|already|still|alone)\b)(?! and the same| or (?:more|two|several)| at a time)|\bones\b",
}
"""Patterns of "what" or "who" as the subject, of the same within a sentence, and of "one" in place of a noun."""
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|cf)\.", re.IGNORECASE)
INLINE_CODE = re.compile(r"``.+?``|`[^`]+`", re.DOTALL)
LIST_ITEM = re.compile(r"\n(?=\s*(?:[-*]|\d+\.|:\w+)\s)|(?<=:)\n")
DIRECTIVE = re.compile(r"#\s*(?:noqa|type:|mypy:|ruff:|!|fmt:|pragma)")
SQL = re.compile(
    r"(?P<comment>(?:--[^\n]*(?:\n[ \t]*(?=--))?)+|/\*.*?\*/)|(?P<literal>'(?:[^']|'')*'(?:\s*\n\s*'(?:[^']|'')*')*)"
    r"|\$(?P<tag>\w*)\$(?P<body>.*?)\$(?P=tag)\$|(?P<says>\b(?:comment on|raise|refuse)\b)|(?P<end>;)",
    re.DOTALL,
)
LEVELS = ("debug", "info", "warning", "error", "exception")
HELP = ("help", "description", "hint")


@dataclass(frozen=True)
class Text:
    """A docstring, a comment or a message, with its place."""

    path: str
    line: int
    content: str

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        """Return the sentences of the text. Blocks of code are left out, and inline code counts as a word."""
        text = ABBREVIATION.sub(lambda found: found[0].replace(".", ""), self.content)
        text = INLINE_CODE.sub(lambda found: re.sub(r"\s+", "·", found[0]), text)
        blocks = [block for block in re.split(r"\n\s*\n", text) if not re.match(r" {4}|\s*>>>", block)]
        items = [" ".join(item.split()) for block in blocks for item in LIST_ITEM.split(block)]
        return tuple(part for item in items for part in re.split(r"(?<=[.!?])[)\"']*\s+", item) if part)

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """Return the names of the patterns that the text matches, each as often as it matches."""
        places = [(name, mark, sentence) for sentence in self.sentences for name, mark in MARKS.items()]
        return tuple(name for name, mark, sentence in places for _ in re.findall(mark, sentence, re.I))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Return the number of words of each sentence."""
        return tuple(len(re.findall(r"\S*[\w…]\S*", sentence)) for sentence in self.sentences)

    @property
    def long(self) -> int:
        """Return the number of sentences that are too long."""
        return sum(length > LONGEST for length in self.lengths)

    def __str__(self) -> str:
        faults = ", ".join(dict.fromkeys([*self.marks, *["long"] * self.long]))
        return f"{self.path}:{self.line}: {faults}: {' '.join(self.content.split())}"


def figures(texts: Sequence[Text]) -> dict[str, int]:
    """Count texts, those with each mark, those with two marks, and the sentences that are too long."""
    marked = {name: sum(name in text.marks for text in texts) for name in MARKS}
    two = sum(len(text.marks) > 1 for text in texts)
    return {"texts": len(texts), **marked, "two": two, "long": sum(text.long for text in texts)}


def clean(texts: Sequence[Text]) -> bool:
    """Whether a folder with these texts is within the limits."""
    counts = figures(texts)
    return max(counts["headless"], counts["two"]) <= LIMIT * len(texts) and not counts["long"]


def _row(folder: str, texts: Sequence[Text]) -> str:
    counts = figures(texts)
    shares = "".join(f"{100 * counts[name] / max(len(texts), 1):9.1f}%" for name in (*MARKS, "two"))
    longest = max((length for text in texts for length in text.lengths), default=0)
    return f"{folder:40}{len(texts):7}{shares}{counts['long']:7}{longest:9}"


def _python(source: str) -> Iterator[tuple[int, str]]:
    yield from _comments(source)
    for node in ast.walk(syntax(source)):
        match node:
            case ast.Expr(ast.Constant(str(text))):
                yield node.lineno, inspect.cleandoc(text)
            case ast.Raise(ast.Call(args=args)):
                yield from ((arg.lineno, _literal(arg)) for arg in args)
            case ast.Call(ast.Attribute(owner, level), [message, *_]) if level in LEVELS:
                if ast.unparse(owner).lower().endswith(("log", "logger")):
                    yield message.lineno, _literal(message)
            case ast.keyword(arg=name, value=value) if name in HELP:
                yield value.lineno, _literal(value)


def _comments(source: str) -> list[tuple[int, str]]:
    """Join the comments of consecutive lines that begin in the same column."""
    blocks: list[list[tuple[int, int, str]]] = []
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string):
            row, column = token.start
            if not blocks or blocks[-1][-1][:2] != (row - 1, column):
                blocks.append([])
            blocks[-1].append((row, column, token.string.lstrip("#").removeprefix(" ")))
    return [(block[0][0], "\n".join(line for *_, line in block)) for block in blocks]


def _literal(node: ast.expr) -> str:
    """Return the text of a string. An ellipsis stands for each value that is formatted into it."""
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr(parts):
            return "".join(map(_literal, parts))
        case ast.BinOp(left, ast.Add(), right):
            return _literal(left) + _literal(right)
    return "…"


def _sql(source: str, first_line: int = 1) -> Iterator[tuple[int, str]]:
    """Yield comments, and the literals of `comment on`, `raise` and `refuse`; function bodies are read the same way."""
    says = False
    for token in SQL.finditer(source):
        line = first_line + source.count("\n", 0, token.start())
        if comment := token["comment"]:
            yield line, re.sub(r"^\s*(?:--|/\*) ?|\*/$", "", comment, flags=re.MULTILINE)
        elif token["body"]:
            yield from _sql(token["body"], line)
        elif token["literal"] and says:
            yield line, re.sub(r"'\s*\n\s*'", "", token["literal"])[1:-1].replace("''", "'")
        elif token["says"] or token["end"]:
            says = bool(token["says"])


def texts(path: Path, root: Path) -> list[Text]:
    """Return the texts of a Python or SQL file with at least two words each, in the order of their lines."""
    source = path.read_text()
    found = sorted(_python(source) if path.suffix == ".py" else _sql(source))
    name = path.relative_to(root).as_posix()
    return [Text(name, line, content) for line, content in found if len(content.split()) > 1]


def by_folder(folders: Iterable[str], root: Path = ROOT) -> dict[str, list[Text]]:
    """Return the texts of all files below these folders, by the folder of the file."""
    found: dict[str, list[Text]] = defaultdict(list)
    for folder in folders:
        for path in sorted(path for kind in ("py", "sql") for path in (root / folder).rglob(f"*.{kind}")):
            found[path.parent.relative_to(root).as_posix()] += texts(path, root)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.prose", description=__doc__)
    parser.add_argument("folders", nargs="*", help="print the texts to rewrite of these folders")
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder that has these folders")
    parser.add_argument("--lint", action="store_true", help="fail if a clean folder exceeds the limits")
    arguments = parser.parse_args()
    folders = by_folder(CLEAN if arguments.lint else arguments.folders or SOURCES, arguments.root.resolve())
    if arguments.lint:
        folders = {folder: found for folder, found in folders.items() if not clean(found)}
    every = [text for found in folders.values() for text in found]
    if arguments.lint or arguments.folders:
        print(*(f"{text}\n" for text in every if text.marks or text.long), sep="", end="")
    if folders:
        print(
            f"{'folder':40}{'texts':>7}{''.join(f'{name:>10}' for name in (*MARKS, 'two'))}{'long':>7}{'longest':>9}"
        )
        print(*(_row(folder, found) for folder, found in folders.items()), sep="\n")
        print(_row("all", every))
    return int(arguments.lint and bool(folders))


if __name__ == "__main__":
    sys.exit(main())
