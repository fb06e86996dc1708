"""Calls, with arguments, of every function of the message queues that all roles may call."""

from __future__ import annotations

SAGA = (
    '{"name": "s", "bungs": "q", "end": "q", "rolled_back": "q", '
    '"steps": [{"name": "a", "queue": "q", "compensation": "q", "after": []}]}'
)

POST = {
    "mbus.post_q('n=>1')",
    "mbus.postn_q(array['n=>1']::hstore[])",
    "mbus.post('q', 'n=>1')",
    "mbus.get_iid('q')",
    f"mbus.start_saga('{SAGA}', '')",
}
CONSUME = {
    "mbus.consume_q_by_default()",
    "mbus.consumen_q_by_default(3)",
    "mbus.take_from_q_by_default('q.1')",
    "mbus.consume('q')",
    "mbus.retry_faults('q')",
    "mbus.claim('q', 'default', '{}', 1)",
    "mbus.lag('q', 'default', 1)",
    "mbus.in_work('q', 'default', '{}')",
    "mbus.changes('q', 'default', '{}', 0, 1)",
    "mbus.ack('q', 'default', '{}')",
    "mbus.note_failure('q', 'default', '{}', 'why')",
    "mbus.skip('q', 'default', '{}', 'why')",
    "mbus.passed('q', 'default', '{\"upto\": 0, \"snapshot\": \"1:1:\"}')",
    "mbus.skip_batch('q', 'default', 'why')",
    "mbus.lease('q', 'default', '{}', 'me', '1 min')",
    "mbus.end_lease('q', 'default', '{}')",
    "mbus.end_leases('q', 'default')",
    "mbus.resume('q', 'default', '{}', '{}')",
    "mbus.outcome('q', 'default', '{}')",
}
LOOK = {
    "mbus.take('q.1')",
    "mbus.peek('q.1')",
    "mbus.peek_q()",
    "mbus.is_msg_exists('q.1')",
    "mbus.estimated_messages('q')",
    "mbus.create_temporary_consumer('q')",
    "mbus.try_again('q.1', '0')",
    "mbus.point('q')",
    "mbus.saga_turn('q.1')",
    "mbus.saga_done('q.1')",
    "mbus.saga_try_again('q.1', '0', 'why')",
    "mbus.saga_roll_back('q.1', 'why')",
}
OTHER = {
    "mbus.consume_q_by_other()",
    "mbus.consumen_q_by_other(3)",
    "mbus.take_from_q_by_other('q.1')",
    "mbus.consume('q', 'other')",
}
KEEP = {
    "mbus.clear_queue_q()",
    "mbus.create_consumer('new', 'q')",
    "mbus.drop_consumer('other', 'q')",
}
MAKE = {
    "mbus.create_queue('new', 4, true)",
    "mbus.drop_queue('q')",
    "mbus.create_trigger('q', 'r')",
    "mbus.drop_trigger('q', 'r')",
}
OWNER = {
    "mbus.create_consumer('new', 'q', 'true')",
    "mbus.create_temporary_consumer('q', 'true')",
    "mbus.create_trigger('q', 'r', 'true')",
    "mbus.create_view('q')",
    "mbus.create_run_function('q')",
}
UNOPENED = {"create_view", "create_run_function"}
DMQ = {"mbus.post_dmq('n=>1')", "mbus.post_dmq('n=>1', iid => 'q.1')"}
FREE = {
    "mbus.list()",
    "mbus.can_post('q')",
    "mbus.can_consume('q')",
    "mbus.create_temporary_queue()",
    "mbus.post_temp('temp.x', 'n=>1')",
    "mbus.consume_temp('temp.x')",
    "mbus.clear_tempq()",
    "mbus.take_lock('q', 'default')",
    "mbus.locked('q', 'default')",
    "mbus.position('q', 'default')",
    "mbus.saga_state(7)",
    "mbus.saga_steps(7)",
    "mbus.saga_retries(7)",
    "mbus.saga_data(7)",
    "mbus.latest_sagas()",
    "mbus.queues()",
    "mbus.stuck_sagas()",
    "mbus.status()",
}
"""Functions that all roles may call: they reveal nothing, or need a name that cannot be guessed."""
EVERY = FREE | POST | CONSUME | OTHER | LOOK | KEEP | MAKE | OWNER | DMQ
