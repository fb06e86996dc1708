"""Settings of the event log: their defaults, and the advice in the error about an invalid setting."""

from __future__ import annotations

import psycopg
import pytest

from tests.event_keeping import configure


def test_settings_have_the_defaults_and_names_that_users_know(connect):
    connection = connect()
    rows = dict(connection.execute("select key, pgmb.get_config_value(id) from pgmb.config").fetchall())
    assert rows.pop("plugin_version")
    assert rows.pop("pg_cron_partition_maintenance_cron")
    assert rows == {
        "partition_retention_period": "60 minutes",
        "future_intervals_to_create": "3 hours",
        "partition_interval": "30 minutes",
        "poll_chunk_size": "10000",
        "use_pg_cron": "false",
        "pg_cron_poll_for_events_cron": "1 second",
    }


def test_the_manual_s_statements_work_one_after_the_other(connect):
    connection = connect()
    for key, value in [
        ("partition_retention_period", "7 days"),
        ("partition_interval", "1 day"),
        ("future_intervals_to_create", "14 days"),
    ]:
        connection.execute(f"update pgmb.config set value = '{value}' where key = '{key}'")


@pytest.mark.parametrize(
    "key", ["partition_retention_period", "future_intervals_to_create", "partition_interval"]
)
@pytest.mark.parametrize("value", ["soon", "", "-1 hour", "0", "10000 years", None])
def test_a_length_of_time_that_is_none_is_refused(unchanged, key, value):
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=f"{key} must be a length of time"):
        configure(unchanged, **{key: value})


@pytest.mark.parametrize("value", ["1 month", "100 milliseconds", "1.5 seconds", "2 years"])
def test_an_interval_that_no_partition_can_have_is_refused(unchanged, value):
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="a partition cannot be"):
        configure(unchanged, partition_interval=value, partition_retention_period="9 years")


@pytest.mark.parametrize(
    "settings",
    [
        {"partition_interval": "2 hours", "partition_retention_period": "2 days"},
        {"partition_retention_period": "1 minute", "partition_interval": "20 seconds"},
        {"future_intervals_to_create": "1 minute", "partition_interval": "1 minute"},
    ],
)
def test_settings_can_change_together_in_any_order(connect, settings):
    configure(connect(), **settings)


@pytest.mark.parametrize("value", ["0", "-5", "many", "1e3", "10000000", "99999999999999", None])
def test_a_size_of_chunks_that_is_none_is_refused(unchanged, value):
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="poll_chunk_size must be a number"):
        configure(unchanged, poll_chunk_size=value)


def test_a_setting_that_there_is_not_is_refused(unchanged):
    with pytest.raises(psycopg.errors.CheckViolation):
        unchanged.execute("insert into pgmb.config values ('partition_intervall', '1 day')")


def test_a_setting_cannot_be_deleted_or_renamed(unchanged):
    for statement in (
        "delete from pgmb.config",
        "update pgmb.config set id = 'plugin_version' where id = 'use_pg_cron'",
    ):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="is needed"):
            unchanged.execute(statement)


def test_a_maintainer_may_change_settings(connect, role):
    keeper = role("keeper")
    connect().execute(f"select pgmb.grant_maintainer('{keeper.name}')")
    with psycopg.connect(keeper.conninfo, autocommit=True) as as_keeper:
        configure(as_keeper, partition_retention_period="2 days")
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            configure(as_keeper, partition_retention_period="0")
