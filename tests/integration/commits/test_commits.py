"""The events of branches that each kind of commit creates."""

from __future__ import annotations

from tests.commits import queued


def branch(connection, kind):
    return connection.execute(
        "insert into revision.branch (type) values (%s) returning id", [kind]
    ).fetchone()[0]


def commit(connection, branch_id=0, state="draft"):
    query = "insert into revision.commit (branch_id, state) values (%s, %s) returning id"
    return connection.execute(query, [branch_id, state]).fetchone()[0]


def test_a_commit_in_trunk_gives_an_event_of_branch_0(connect):
    connection = connect()
    assert queued(connection) == []
    one = commit(connection)
    assert queued(connection) == [(one, 0)]


def test_approving_a_commit_gives_an_event_of_the_approved_branch(connect):
    connection = connect()
    approved = branch(connection, "approved")
    one = commit(connection)
    connection.execute("update revision.commit set state = 'approved'")
    assert queued(connection) == [(one, 0), (one, approved)]


def test_approving_twice_in_a_row_gives_one_event(connect):
    connection = connect()
    branch(connection, "approved")
    commit(connection)
    for _ in range(2):
        connection.execute("update revision.commit set state = 'approved'")
    assert len(queued(connection)) == 2


def test_a_commit_in_a_stable_branch_gives_an_event_of_that_branch(connect):
    connection = connect()
    stable = branch(connection, "stable")
    one = commit(connection, stable)
    assert queued(connection) == [(one, stable)]


def test_making_a_stable_branch_from_the_approved_one_gives_no_event(connect):
    connection = connect()
    approved = branch(connection, "approved")
    commit(connection, state="approved")
    before = queued(connection)
    connection.execute("update revision.branch set type = 'stable' where id = %s", [approved])
    branch(connection, "approved")
    assert queued(connection) == before


def test_a_commit_inserted_approved_gives_both_events(connect):
    connection = connect()
    approved = branch(connection, "approved")
    one = commit(connection, state="approved")
    assert queued(connection) == [(one, 0), (one, approved)]


def test_a_commit_that_no_rule_names_goes_nowhere(connect):
    connection = connect()
    archive = branch(connection, "archive")
    commit(connection, archive)
    commit(connection, 4711)
    assert queued(connection) == []


def test_a_rolled_back_savepoint_takes_its_events_along(connect):
    connection = connect(autocommit=False)
    one = commit(connection)
    connection.execute("savepoint s")
    commit(connection)
    connection.execute("rollback to s")
    connection.commit()
    assert queued(connection) == [(one, 0)]
