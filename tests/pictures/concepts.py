"""The picture of each concept, by the name of its file."""

from __future__ import annotations

from collections.abc import Mapping

from tests.pictures.diagrams import Arrow, Bar, Box, Mark, Note, drawn


def batch() -> str:
    claim = Box("claim:\nthe batch is recorded", 0, 0)
    process = Box("process:\nPython or Spark", 1, 0, "yours")
    ack = Box("ack: write results,\nmove the consumer", 2, 0)
    commit = Box("one commit", 3, 0, "results")
    failure = Box("failure: nothing\nis kept but the claim", 1, 1, "failed")
    return drawn(
        "A batch is claimed, processed, acked and committed. After a failure the same batch is claimed again.",
        4,
        2,
        [
            *(claim, process, ack, commit, failure),
            Arrow(claim, process, "changes"),
            Arrow(process, ack, "results"),
            Arrow(ack, commit),
            Arrow(process, failure, "error or crash"),
            Arrow(failure, claim, "same batch, same id"),
        ],
    )


def watermark() -> str:
    return drawn(
        "Transactions that commit in another order than they began, and two snapshots of a consumer",
        3.4,
        2.1,
        [
            Bar("transaction 100", 0.3, 1.1, 0.2),
            Bar("transaction 101", 0.5, 2.4, 0.6),
            Bar("transaction 102", 0.8, 1.5, 1.0),
            Mark("snapshot A: sees 100 and 102", 1.7, 0.1, 1.5),
            Mark("snapshot B: sees 101, too", 2.6, 0.1, 1.5),
            Note("batch A: the commits of 100 and 102", 1.0, 1.68),
            Note("batch B: the commits of 101", 2.2, 1.68),
            Note("time →", 0, 1.68),
        ],
    )


def tube() -> str:
    table = Box("your table", 0, 0, "yours")
    pods = Box("pods: 41 U {7,9}\n42 D {3}", 1, 0)
    worker = Box("worker: claims\nthe ids 3, 7, 9", 2, 0)
    copy = Box("copy, index\nor report", 3, 0, "results")
    rows = Box("rows 7 and 9 as they\nare now; 3 is gone", 2, 1, "yours")
    return drawn(
        "Changes of a table leave pods with ids. A worker claims ids, reads the rows as they are now, and writes a copy.",
        4,
        2,
        [
            *(table, pods, worker, copy, rows),
            Arrow(table, pods, "trigger"),
            Arrow(pods, worker, "claim"),
            Arrow(worker, copy, "write, ack"),
            Arrow(rows, worker, "read"),
        ],
    )


def event_log() -> str:
    publisher = Box("publishers", 0, 0.5, "yours")
    log = Box("events; dispatch\nmatches conditions", 1, 0.5)
    mails, audit = Box("group mails:\nids and cursor", 2, 0), Box("group audit:\nids and cursor", 2, 1)
    feed, stream = Box("feed: batches", 3, 0, "results"), Box("handlers, streams", 3, 1, "results")
    return drawn(
        "Publishers insert events. Dispatch matches each event with all subscriptions. Each group has a cursor.",
        4,
        2,
        [
            *(publisher, log, mails, audit, feed, stream),
            Arrow(publisher, log, "insert"),
            Arrow(log, mails),
            Arrow(log, audit),
            Arrow(mails, feed),
            Arrow(audit, stream),
        ],
    )


def queue() -> str:
    post = Box("post", 0, 0.5, "yours")
    messages = Box("queue orders", 1, 0.5)
    default, audit = Box("consumer default", 2, 0), Box("consumer audit", 2, 1)
    workers = Box("worker 1: m1, m3\nworker 2: m2", 3, 0, "results")
    auditor = Box("worker 1:\nm1, m2, m3", 3, 1, "results")
    return drawn(
        "Each consumer of a queue receives every message. Each message goes to a single worker of a consumer.",
        4,
        2,
        [
            *(post, messages, default, audit, workers, auditor),
            Arrow(post, messages, "m1, m2, m3"),
            Arrow(messages, default),
            Arrow(messages, audit),
            Arrow(default, workers, "each once"),
            Arrow(audit, auditor),
        ],
    )


def saga() -> str:
    room, flight, end = (
        Box("step room", 0, 0),
        Box("step flight", 1, 0),
        Box("end: complete", 2, 0, "results"),
    )
    bung = Box("bung", 0, 1, "failed")
    no_room, no_flight = Box("cancel room", 1, 1, "yours"), Box("cancel flight", 1, 2, "yours")
    back = Box("end: rolled back", 2, 1, "results")
    return drawn(
        "The steps of a saga follow each other. The compensations wait behind a bung, which only a roll-back removes.",
        3,
        3,
        [
            *(room, flight, end, bung, no_room, no_flight, back),
            Arrow(room, flight, "done"),
            Arrow(flight, end, "done"),
            Arrow(bung, no_room, "roll-back"),
            Arrow(bung, no_flight),
            Arrow(no_room, back, "both done"),
            Arrow(no_flight, back),
        ],
    )


def topology() -> str:
    writer = Box("administrator,\nPatroni", 0, 0.5, "yours")
    catalogue = Box("catalogue\nand its log", 1, 0.5)
    relay, feed = Box("relay", 2, 0), Box("TopologyFeed", 2, 1)
    clients, dags = Box("clients: snapshot,\nthen changes", 3, 0, "results"), Box("DAGs", 3, 1, "results")
    return drawn(
        "Changes of a cluster are recorded in a catalogue. A relay tells clients, and a feed wakes DAGs.",
        4,
        2,
        [
            *(writer, catalogue, relay, feed, clients, dags),
            Arrow(writer, catalogue, "set_master, ..."),
            Arrow(catalogue, relay, "read"),
            Arrow(catalogue, feed, "claim"),
            Arrow(relay, clients, "push"),
            Arrow(feed, dags, "batches"),
        ],
    )


def lag() -> str:
    return drawn(
        "The changes of a feed for a consumer: processed, in a batch, ready, and waiting",
        3.75,
        1.8,
        [
            Bar("processed", 0, 1.1, 0.5, "results"),
            Bar("batch in work", 1.12, 1.66, 0.5, "yours"),
            Bar("ready", 1.68, 2.5, 0.5),
            Bar("waiting", 2.52, 3.3, 0.5, "failed"),
            Mark("progress", 1.11, 0.3, 1.0),
            Note("the lag: how many changes are ready, and the age of the oldest", 1.2, 1.2),
            Note("oldest", 0, 0.35),
            Note("newest", 3.05, 0.35),
        ],
    )


def guarantees() -> str:
    where = Box("Where are\nthe results?", 0, 1)
    here = Box("in the feed's\nPostgreSQL", 1, 0, "yours")
    other = Box("another PostgreSQL,\na lake table", 1, 1, "yours")
    outside = Box("elsewhere", 1, 2, "yours")
    once = Box("exactly once:\none commit", 2, 0, "results")
    number = Box("exactly once, with\nexceptions", 2, 1, "results")
    again = Box("at least once:\nuse Batch.id as key", 2, 2, "failed")
    return drawn(
        "The place of the results decides how often a change counts",
        3,
        3,
        [
            *(where, here, other, outside, once, number, again),
            Arrow(where, here),
            Arrow(where, other),
            Arrow(where, outside),
            Arrow(here, once),
            Arrow(other, number),
            Arrow(outside, again),
        ],
    )


CONCEPTS: Mapping[str, str] = {
    f"concept-{draw.__name__.replace('_', '-')}": draw()
    for draw in (batch, watermark, tube, event_log, queue, saga, topology, lag, guarantees)
}
