"""The functions that existing users and clients call keep their names, the order of their arguments, and their
results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

LISTED = re.findall(
    r"^(\w+)\.(\w+)\((.*)\) -> (.*)$",
    Path(__file__).parents[2].joinpath("signatures.txt").read_text(),
    re.MULTILINE,
)
SPELLINGS = {
    "timestamp with time zone": "timestamptz",
    "timestamp without time zone": "timestamp",
    "character varying": "varchar",
    "IN ": "",
    "(pgmb.get_config_value(('poll_chunk_size'::text)::pgmb.config_type))::integer": "poll_chunk_size",
}
ROUTINES = """
    select p.proname::text, pg_get_function_arguments(p.oid), coalesce(pg_get_function_result(p.oid), 'procedure')
    from pg_proc as p where p.pronamespace = %s::regnamespace
"""


def spelled(text):
    for long, short in SPELLINGS.items():
        text = text.replace(long, short)
    return re.sub(r" DEFAULT [^,]*?(?=,|$)", " =", text)


def is_called(arguments, theirs):
    """Whether a call with the arguments ``theirs`` is valid: all arguments after them have defaults."""
    more = arguments.removeprefix(theirs)
    return arguments.startswith(theirs) and all(
        part.endswith(" =") for part in more.removeprefix(", ").split(", ") if part
    )


@pytest.mark.parametrize("system", ["pubsub", "tube", "pgmb", pytest.param("mbus", marks=pytest.mark.hstore)])
def test_each_function_that_clients_call_has_its_arguments_and_result(connect, system):
    connection = connect()
    if system == "mbus":
        connection.execute("select mbus.create_queue('q', 2), mbus.create_run_function('q')")
    there = [tuple(map(spelled, row)) for row in connection.execute(ROUTINES, [system])]
    wanted = [rest for schema, *rest in LISTED if schema == system]
    assert wanted != []
    assert [
        f"{name}({arguments}) -> {result}"
        for name, arguments, result in wanted
        if not any(
            (one, returned) == (name, result) and is_called(more, arguments) for one, more, returned in there
        )
    ] == []


def test_an_argument_that_has_to_be_given_is_no_addition():
    assert is_called("a text, b integer =", "a text")
    assert not is_called("a text, b integer", "a text")
    assert not is_called("b integer, a text", "a text")
