// Message queues: their lengths, and the reasons why messages wait.
import { chakra, h } from "./shell.js";
import { queues as ask } from "./api.js";
import { eachDatabase } from "./each.js";
import { Empty, Guide, Name, NamedLink, Section } from "./pieces.js";
import { Cell, Rows } from "./table.js";
import { To, at, atConsumer } from "./views.js";
import { about, absolute, count, many, span } from "./words.js";

const { Table, Text } = chakra;

const COLUMNS = [
  ["Queue"],
  ["Consumer"],
  ["Length", true, null, { hint: "Messages that the consumer has still to receive, including its batch in work" }],
  ["Oldest", true, null, { hint: "How long the oldest of these messages has waited" }],
  ["Ready", true, null, { hint: "Messages that the next claim would return" }],
  ["Delayed", true, null, { hint: "Messages that are not delivered before a time that has not come yet" }],
  ["Behind another", true, null, { hint: "Messages that wait until an earlier message is processed" }],
  ["In work", true, null, { hint: "Messages in claimed batches" }],
  ["Dead letters", true, null, { hint: "Messages of the queue that a consumer gave up" }],
];

// The messages that a consumer has still to receive, including those of its batch in work.
const length = ({ ready, delayed, waiting, in_work: inWork }) => (ready === null ? null : ready + delayed + waiting + inWork);

const since = (seconds) => (seconds === null ? undefined : absolute(Date.now() - seconds * 1000));

// The first consumer's row shows the queue and the number of its dead messages.
const Row = ({ queue, first, rows, connection }) =>
  h(
    Table.Row,
    null,
    first &&
      h(
        Cell,
        { rowSpan: rows, minW: "8rem", maxW: "18rem" },
        h(Name, null, queue.queue),
        h(Text, { color: "fg.muted", fontSize: "xs" }, many(queue.parts, "part")),
      ),
    h(
      Cell,
      { minW: "8rem", maxW: "24rem", overflowWrap: "anywhere" },
      h(NamedLink, { to: atConsumer({ connection, kind: "queue", consumer: `queue:${queue.queue}/${queue.consumer}` }) }, queue.consumer),
      queue.selector && h(Text, { color: "fg.muted", fontSize: "xs" }, `where ${queue.selector}`),
      queue.failure && h(Text, { color: "orange.fg", fontSize: "xs" }, queue.failure),
    ),
    h(Cell, { number: true }, about(length(queue), queue.exact)),
    h(Cell, { number: true, title: since(queue.oldest_seconds) }, span(queue.oldest_seconds)),
    h(Cell, { number: true }, count(queue.ready)),
    h(Cell, { number: true }, count(queue.delayed)),
    h(Cell, { number: true }, count(queue.waiting)),
    h(Cell, { number: true }, count(queue.in_work)),
    first &&
      h(
        Cell,
        { rowSpan: rows, number: true },
        queue.dead ? h(To, { to: at("letters") }, count(queue.dead, queue.dead_exact)) : "0",
      ),
  );

const Queues = ({ found, title, database: { connection } }) =>
  h(
    Section,
    { title },
    found.queues.length
      ? h(
          Rows,
          { label: title, columns: COLUMNS },
          found.queues.map((queue, place) =>
            h(Row, {
              key: `${queue.queue} ${queue.consumer}`,
              queue,
              first: found.queues[place - 1]?.queue !== queue.queue,
              rows: found.queues.filter((one) => one.queue === queue.queue).length,
              connection,
            }),
          ),
        )
      : h(
          Empty,
          null,
          "There is no message queue here from which the role of the connection may consume. To create a queue, call mbus.create_queue().",
          h(Guide, { name: "queues" }, "How to create a queue and post to it"),
        ),
  );

export const AllQueues = eachDatabase({ ask, title: "Queues", Shown: Queues, isEmpty: ({ queues }) => !queues.length });
