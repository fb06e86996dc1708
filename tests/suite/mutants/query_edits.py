"""Edits of a query. After each edit the query parses, and has another meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.suite.mutants.mutant import Edit
from tests.suite.mutants.query import STOPS, Query, bare, parsed, walk

_NEXT = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}


def query_edits(text: str, prefix: str = "") -> Iterator[Edit]:
    """Yield edits of a text that parses after a prefix. Yield nothing if it does not parse."""
    query = parsed(prefix + text)
    if query is None:
        return
    meaning = bare(query.tree)
    for find in _FINDERS:
        for edit in find(query):
            mutated = parsed(edit.apply(query.text))
            if edit.start >= len(prefix) and mutated is not None and bare(mutated.tree) != meaning:
                yield edit.moved(-len(prefix))


def _conditions(query: Query) -> Iterator[Edit]:
    """Drop one of several conditions that are joined by ``and`` or ``or``."""
    for node in query.nodes("BoolExpr"):
        joint = query.at(node["location"])
        if node["boolop"] == "NOT_EXPR" or joint is None:
            continue
        pieces = _joined(query, joint)
        if len(pieces) != len(node["args"]):
            continue
        for number, (start, end) in enumerate(pieces):
            alone = parsed("select " + query.text[start:end])
            if alone is None or _value(alone) != bare(node["args"][number]):
                continue
            if number == 0:
                yield Edit(start, pieces[1][0], "", "drop condition")
            else:
                yield Edit(pieces[number - 1][1], end, "", "drop condition")


def _joined(query: Query, joint: int) -> list[tuple[int, int]]:
    """Return the positions of the operands in a chain of equal operators. ``joint`` is the first operator."""
    word = query.tokens[joint].word
    stops = STOPS if word == "and" else STOPS - {"and"}
    pieces = [query.span(query.backward(joint - 1, stops), joint)] if joint else []
    while joint < len(query.tokens) and query.tokens[joint].word == word:
        behind = query.forward(joint + 1, stops)
        if behind == joint + 1:
            break
        pieces.append(query.span(joint + 1, behind))
        joint = behind
    return pieces


def _value(query: Query) -> object:
    """Return the tree of an expression that is the whole query."""
    targets = query.tree["stmts"][0]["stmt"].get("SelectStmt", {}).get("targetList")
    return bare(targets[0]["ResTarget"].get("val")) if targets else None


def _only_conditions(query: Query) -> Iterator[Edit]:
    """Drop the only condition of a clause."""
    for i, token in enumerate(query.tokens):
        if token.word in ("where", "on", "having"):
            behind = query.forward(i + 1, STOPS - {"and", "or"})
            level = token.level
            inside = query.tokens[i + 1 : behind]
            if inside and not any(t.level == level and t.word in ("and", "or") for t in inside):
                yield Edit(*query.span(i + 1, behind), "true", "drop condition")


def _orders(query: Query) -> Iterator[Edit]:
    """Reverse a key of an ``order by``, or drop it."""
    for i, token in enumerate(query.tokens[:-1]):
        if (token.word, query.tokens[i + 1].word) != ("order", "by"):
            continue
        keys, first = [], i + 2
        while (behind := query.forward(first)) > first:
            keys.append((first, behind))
            if behind == len(query.tokens) or query.tokens[behind].word != ",":
                break
            first = behind + 1
        for number, (first, behind) in enumerate(keys):
            yield _turned(query, first, behind)
            start, end = query.span(first, behind)
            if number:
                yield Edit(query.tokens[first - 1].start, end, "", "drop order")
            elif len(keys) > 1:
                yield Edit(start, query.tokens[keys[1][0]].start, "", "drop order")
            else:
                yield Edit(token.start, end, "", "drop order")


def _turned(query: Query, first: int, behind: int) -> Edit:
    for token in query.tokens[first:behind]:
        if token.word in ("asc", "desc") and token.level == query.tokens[first].level:
            return Edit(token.start, token.end, "asc" if token.word == "desc" else "desc", "turn order")
    end = query.tokens[behind - 1].end
    return Edit(end, end, " desc", "turn order")


def _bounds(query: Query) -> Iterator[Edit]:
    """Change a bound by one: in a comparison, or in a whole number that is not part of a type."""
    for node in query.nodes("A_Expr"):
        i = query.at(node.get("location", 0))
        if i is not None and query.tokens[i].word in _NEXT:
            token = query.tokens[i]
            yield Edit(token.start, token.end, _NEXT[token.word], "off by one")
    typed = {
        const.get("location")
        for modifiers in query.nodes("typmods")
        for name, const in walk(modifiers)
        if name == "A_Const"
    }
    for node in query.nodes("A_Const"):
        i = query.at(node.get("location", 0))
        if "ival" in node and node.get("location") not in typed and i is not None:
            token = query.tokens[i]
            if token.word.isdigit():
                yield Edit(token.start, token.end, str(int(token.word) + 1), "off by one")


def _row_locks(query: Query) -> Iterator[Edit]:
    """Drop the row locks of a query, or their ``nowait`` or ``skip locked``."""
    if next(query.nodes("CreatePolicyStmt"), None) is not None:
        # The ``for update`` of a policy is a command and not a lock.
        return
    for i, token in enumerate(query.tokens):
        following = [t.word for t in query.tokens[i + 1 : i + 4]]
        if token.word == "for" and following and following[0] in ("update", "share", "no", "key"):
            start, end = query.span(i, query.forward(i + 1, STOPS - {","}))
            yield Edit(start, end, "", "drop lock")
        elif token.word == "skip" and following[:1] == ["locked"]:
            yield Edit(token.start, query.tokens[i + 1].end, "", "drop lock")


def _lock_calls(query: Query) -> Iterator[Edit]:
    """Replace the call that takes an advisory lock by the result of a call that got it."""
    for node in query.nodes("FuncCall"):
        name = node["funcname"][-1]["String"]["sval"]
        first = query.at(node["location"])
        if first is None or "advisory" not in name or "lock" not in name:
            continue
        opening = next(i for i in range(first, len(query.tokens)) if query.tokens[i].word == "(")
        start, end = query.span(first, query.closing(opening) + 1)
        yield Edit(start, end, "true" if "_try_" in name else "null::void", "drop lock")


def _coalesces(query: Query) -> Iterator[Edit]:
    """Replace ``coalesce`` by its first argument."""
    for node in query.nodes("CoalesceExpr"):
        first = query.at(node["location"])
        if first is None:
            continue
        start, end = query.span(first, query.closing(first + 1) + 1)
        behind = query.forward(first + 2, frozenset({","}))
        yield Edit(start, end, f"({_text(query, first + 2, behind)})", "drop coalesce")


def _text(query: Query, first: int, behind: int) -> str:
    """Return the text of some tokens, with the text between them."""
    start, end = query.span(first, behind)
    return query.text[start:end]


def _exists(query: Query) -> Iterator[Edit]:
    """Negate ``exists``."""
    for node in query.nodes("SubLink"):
        i = query.at(node["location"])
        if node["subLinkType"] != "EXISTS_SUBLINK" or i is None:
            continue
        token = query.tokens[i]
        if i and query.tokens[i - 1].word == "not":
            yield Edit(query.tokens[i - 1].start, token.start, "", "exists")
        else:
            yield Edit(token.start, token.start, "not ", "exists")


def _sets(query: Query) -> Iterator[Edit]:
    """Keep duplicates instead of removing them, or remove them instead of keeping them."""
    for i, token in enumerate(query.tokens):
        following = query.tokens[i + 1].word if i + 1 < len(query.tokens) else ""
        if token.word == "union" and following == "all":
            yield Edit(token.end, query.tokens[i + 1].end, "", "union")
        elif token.word == "union":
            yield Edit(token.end, token.end, " all", "union")
        elif token.word == "distinct" and following == "on":
            end = query.tokens[query.closing(i + 2)].end
            yield Edit(token.start, end, "", "drop distinct")
        elif token.word == "distinct" and query.tokens[i - 1].word not in ("is", "not"):
            yield Edit(token.start, token.end, "", "drop distinct")


_FINDERS: tuple[Callable[[Query], Iterator[Edit]], ...] = (
    _conditions,
    _only_conditions,
    _orders,
    _bounds,
    _row_locks,
    _lock_calls,
    _coalesces,
    _exists,
    _sets,
)
