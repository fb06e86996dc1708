"""Two sessions create the same object at once: the second waits for the first, and then finds the object."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.tubes import one
from tests.waiting import until, waits

SETUP = """
    create table public.item (id bigint primary key);
    select tube.tube_ensure_exists('there');
"""
CASES = {
    "tube": ("select tube.tube_ensure_exists('made')", "select count(*) from tube.tube where name = 'made'"),
    "queue": ("select mbus.create_queue('made', 2)", "select count(*) from mbus.queue"),
    "group": (
        "insert into pgmb.subscriptions (group_id, params) values ('made', jsonb_build_object('by', pg_backend_pid()))",
        "select count(*) from pgmb.subscription_groups",
    ),
    "capture by a tube": (
        "select tube.tube_table_ensure_attached('there', 'public.item', 0)",
        "select count(*) from tube.attachment",
    ),
    "capture by the event log": (
        "select pgmb.push_table_mutations('public.item')",
        "select count(distinct tgrelid) from pg_trigger where tgrelid = 'public.item'::regclass",
    ),
    "capture by the commit queue": (
        "select revision.track('public.item')",
        "select count(*) from revision.tracked",
    ),
}


@pytest.mark.parametrize(
    "made", [pytest.param(name, marks=pytest.mark.hstore if name == "queue" else ()) for name in CASES]
)
def test_the_second_of_two_sessions_that_make_the_same_finds_it_made(connect, made):
    first, second, watcher = connect(), connect(), connect()
    call, count = CASES[made]
    watcher.execute(SETUP)
    with ThreadPoolExecutor(1) as pool:
        with first.transaction():
            first.execute(call)
            late = pool.submit(second.execute, call)
            until(watcher, waits(second, behind=first))
        late.result(30)
    assert one(watcher, count) == 1
