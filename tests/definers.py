"""Every function that runs with the rights of its owner: who may call it, and what it asks before it does anything."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Asked:
    """Functions that ask the same of the same callers.

    ``callers``: the grants that open them, ``public``, or ``nobody`` but their owner. ``asks``: what stands between a
    caller and what they do; ``by``: a pattern that is then in the source of each.
    """

    callers: str
    asks: str
    functions: str
    by: str = ""


ASKED = (
    Asked(
        "public",
        "whether who logged in, not who is set, may do that with the queue or the consumer that is named",
        """
        mbus.can_consume mbus.can_post mbus.clear_queue_q mbus.consumen_q_by_default mbus.create_consumer
        mbus.create_queue mbus.create_run_function mbus.create_temporary_consumer mbus.create_trigger mbus.create_view
        mbus.drop_consumer mbus.drop_queue mbus.drop_trigger mbus.estimated_messages mbus.feed_ack mbus.feed_changes
        mbus.feed_claim mbus.feed_in_work mbus.feed_lag mbus.feed_note_failure mbus.feed_passed mbus.feed_point
        mbus.feed_skip mbus.get_iid mbus.is_msg_exists mbus.list mbus.peek mbus.peek_q mbus.post_dmq mbus.post_q
        mbus.postn_q mbus.retry_faults mbus.saga_done mbus.saga_roll_back mbus.saga_state mbus.saga_turn
        mbus.start_saga mbus.take mbus.take_from_q_by_default mbus.try_again
        """,
        by=r"mbus\.(demand|deny|may|feed_consumer)\(",
    ),
    Asked(
        "public",
        "the same, by the function that they begin with, which asks",
        "mbus.consume_q_by_default mbus.saga_try_again mbus.skip_batch",
        by=r"mbus\.(consumen_q_by_default|saga_turn|feed_in_work)\(",
    ),
    Asked(
        "public",
        "whether who logged in may select from a view that is the owner's and depends on the function; no name",
        "mbus.seen$",
        by=r"mbus\.may_receive_through\(",
    ),
    Asked(
        "public",
        "the same of each saga, and leaves out the others",
        "mbus.stuck_sagas",
        by=r"mbus\.sees_saga\(",
    ),
    Asked(
        "public",
        "the name of a temporary queue, which nobody can guess",
        "mbus.consume_temp mbus.post_temp",
        by=r"mbus\.temporary_lives\(",
    ),
    Asked(
        "public",
        "nothing: they hold a lock that anybody could take by its number, tell that it is held and numbers alone, make a "
        "name that nobody can guess, and remove what no session holds any more",
        "mbus.clear_tempq mbus.create_temporary_queue mbus.feed_lock mbus.feed_locked mbus.feed_position",
    ),
    Asked(
        "nobody",
        "whether who logged in is the owner",
        "mbus.rebase_after_restore mbus.restore_roles",
        by=r"mbus\.deny\(",
    ),
    Asked(
        "nobody",
        "nothing: they are parts of others, or the functions of a queue without roles, which its owner grants",
        """
        mbus.clear_queue_r mbus.consume_r_by_default mbus.consumen_r_by_default mbus.peek_r mbus.post_r mbus.postn_r
        mbus.receive$ mbus.take_from_r_by_default
        pgmb.check_cursor pgmb.check_group pgmb.check_kept pgmb.check_position pgmb.faults pgmb.restored
        pubsub.check_history pubsub.check_readable pubsub.first_commit_at pubsub.has_commits pubsub.needed_by
        pubsub.trim_partition pubsub.txids_look_kept
        revision.add_partition revision.add_partitions revision.drop_empty_partitions
        topology.advance topology.check_readable topology.next_batch
        """,
    ),
    Asked(
        "nobody",
        "nothing: the function of a table's owner, who grants it; it reads that table, by what the tube says of it",
        "public.pgchange_judge_$",
    ),
    Asked(
        "writers",
        "nothing: they fire for who may write the table, and note what was written; as the schema's owner",
        """
        mbus.after_dead mbus.copy$ mbus.view$ mbus.write_letters
        pgmb.check_setting pgmb.check_settings pgmb.condition_added pgmb.publish
        revision.commit_inserted revision.commit_updated
        topology.capture_address topology.capture_bucket topology.capture_instance topology.capture_replicaset
        topology.take_turn
        """,
    ),
    Asked(
        "writers",
        "nothing: they fire for who may write the table, and note what was written; as the table's owner",
        """
        public.pgchange_capture_item public.pgchange_push_item_delete_$ public.pgchange_push_item_insert_$
        public.pgchange_push_item_update_$ public.pgchange_touch_delete_$ public.pgchange_touch_insert_$
        public.pgchange_touch_truncate_$ public.pgchange_touch_update_$
        """,
    ),
    Asked(
        "mbus.keeper",
        "whether who logged in may consume from the queue",
        "mbus.check_letter mbus.letter_rights mbus.send_again",
        by=r"mbus\.(may|letter_rights)\(",
    ),
    Asked(
        "mbus.maintainer",
        "nothing: a maintainer sees what is wrong with every queue, and ends what is over",
        "mbus.forget_sagas mbus.roll_back_overdue mbus.maintain mbus.saga_trouble mbus.troubles",
    ),
    Asked(
        "pgchange_staging.keeper",
        "the name and the comment of a table of that schema, which say that it is ours; and that nobody uses it",
        "pgchange_staging.drop_leftovers pgchange_staging.leftovers",
    ),
    Asked(
        "pgmb.conditions",
        "nothing: who may write conditions may do what the owner can",
        "pgmb.prepare_poll_for_events_fn",
    ),
    Asked(
        "pgmb.consumer pgmb.keeper",
        "nothing: consumers trust each other; each can read every event and move every group",
        """
        pgmb.ack pgmb.claim pgmb.give_up_events pgmb.lag pgmb.mark pgmb.note_failure pgmb.passed pgmb.point
        pgmb.position pgmb.read_events pgmb.read_next_events pgmb.register pgmb.replay_events pgmb.retry_events
        pgmb.set_group_cursor pgmb.system_identifier
        """,
    ),
    Asked(
        "pgmb.consumer pgmb.dispatcher pgmb.keeper pgmb.maintainer",
        "nothing: a dispatcher dispatches, and sees how far every group is",
        "pgmb.dispatch pgmb.status",
    ),
    Asked(
        "pgmb.keeper",
        "nothing: a keeper moves, drops and skips for every group",
        """
        pgmb.adopt_mark pgmb.check_letter pgmb.cursor_of pgmb.drop_group pgmb.in_work pgmb.move_group pgmb.note_move
        pgmb.pending pgmb.replay_faults pgmb.send_again pgmb.skip pgmb.skip_batch
        """,
    ),
    Asked(
        "pgmb.keeper pgmb.maintainer",
        "that a table is one of the two of the log",
        """
        pgmb.crowded_default pgmb.drop_emptied pgmb.make_partitions pgmb.trim_partitions
        """,
        by=r"pgmb\.check_append_only\(",
    ),
    Asked(
        "pgmb.keeper pgmb.maintainer",
        "nothing: a maintainer deletes what is old and makes room, by the settings",
        """
        pgmb.dispatching pgmb.expire_subscriptions pgmb.forget_dropped pgmb.forget_faults pgmb.holders
        pgmb.maintain_append_only_table pgmb.maintain_events_table pgmb.overdue pgmb.place_scheduled pgmb.trim_published
        """,
    ),
    Asked(
        "pgmb.publisher",
        "the whole of an event: they tell whether another one has its id",
        "pgmb.other_events",
    ),
    Asked(
        "pgmb.pusher",
        "the triggers on the table whose functions are its owner's, and not the caller",
        "pgmb.note_push",
        by=r"f\.proowner = c\.relowner",
    ),
    Asked(
        "pgmb.keeper pgmb.maintainer pgmb.pusher",
        "nothing: it tells which tables publish their mutations",
        "pgmb.pushing",
    ),
    Asked(
        "pgmb.conditions pgmb.subscriber",
        "nothing: subscribers trust each other",
        "pgmb.condition_known pgmb.make_group",
    ),
    Asked(
        "pgmb.conditions pgmb.consumer pgmb.keeper pgmb.subscriber",
        "nothing: who reads or subscribes keeps subscriptions alive",
        "pgmb.keep_alive",
    ),
    Asked(
        "pubsub.consumer pubsub.keeper",
        "nothing: consumers trust each other; each can read every commit and advance every consumer",
        """
        pubsub.ack pubsub.check_origin pubsub.check_position pubsub.claim pubsub.faults pubsub.held_back_by
        pubsub.in_work pubsub.lock_watermark pubsub.mark pubsub.note_failure pubsub.poll pubsub.position
        pubsub.register pubsub.skip pubsub.status pubsub.system_identifier
        """,
    ),
    Asked(
        "pubsub.keeper",
        "nothing: a keeper moves and drops every consumer, and trims the history",
        """
        pubsub.adopt_mark pubsub.check_letter pubsub.drop_consumer pubsub.move_consumer pubsub.pending
        pubsub.send_again pubsub.skip_batch pubsub.trim_commit_queue
        """,
    ),
    Asked(
        "revision.maintainer",
        "nothing: a maintainer makes and drops the partitions of the queue",
        "revision.crowded_default revision.maintain_partitions",
    ),
    Asked(
        "revision.tracker",
        "the trigger on the table, and that its function is the owner's",
        "revision.register",
        by=r"p\.proowner = c\.relowner",
    ),
    Asked(
        "revision.tracker",
        "nothing: they tell a column's name, make a branch for a table, and forget one that has no capture",
        "revision.key_column revision.own_branch revision.unregister",
    ),
    Asked(
        "revision.maintainer revision.tracker",
        "nothing: it tells which tables are tracked",
        "revision.tracking",
    ),
    Asked(
        "topology.consumer topology.keeper",
        "nothing: consumers trust each other; each can advance every consumer",
        """
        topology.ack topology.changes topology.check_position topology.claim topology.in_work topology.lag
        topology.mark topology.note_failure topology.passed topology.pending topology.point topology.position
        topology.register topology.skip topology.slices topology.status topology.system_identifier
        """,
    ),
    Asked(
        "topology.keeper",
        "nothing: a keeper moves and drops every consumer, and trims the log",
        """
        topology.adopt_mark topology.check_letter topology.drop_consumer topology.move_consumer topology.send_again
        topology.trim_log
        """,
    ),
    Asked(
        "topology.operator",
        "nothing: an operator changes the catalogue",
        """
        topology.add_instance topology.add_replicaset topology.assign_buckets topology.choose_master
        topology.move_buckets topology.remove_instance topology.remove_replicaset topology.set_address
        topology.set_master topology.set_state
        """,
    ),
    Asked(
        "topology.consumer topology.keeper topology.operator topology.reader",
        "nothing: a reader reads all of the catalogue and of its log",
        """
        topology.begin_term topology.events topology.lacking topology.now_at topology.snapshot topology.unsettled
        """,
    ),
    Asked(
        "tube.keeper tube.use",
        "nothing: they hold the shard of a table for who writes it, and tell whether it is attached",
        "tube.hold_shard tube.is_attached",
    ),
)
