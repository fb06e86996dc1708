// The event log: the reader of each group, unread partitions, and the reasons why a group does not advance.
import { Fragment, chakra, h } from "./shell.js";
import { events as ask } from "./api.js";
import { eachDatabase } from "./each.js";
import { Ago, Call, Empty, Fact, Guide, OfConsumer, Section, State, Told } from "./pieces.js";
import { Cell, Rows } from "./table.js";
import { To } from "./views.js";
import { STATES, UNKNOWN, about, count, many, span } from "./words.js";

const { Box, Table, Text } = chakra;

const GROUPS = [["State"], ["Group"], ["Read by"], ["Ready", true], ["Oldest", true], ["Read up to", true], ["Problem"]];
const PARTITIONS = [["State"], ["Partition"], ["Begins", true], ["Ends", true], ["Size", true], ["Not read by"], ["Unread", true]];

// Reading and dispatching take seconds. After this time a person should look.
const LONG = 60;

const ago = (time) => (Date.now() - Date.parse(time)) / 1000;

const process = (number, application) => (application ? `${application}, process ${number}` : `process ${number}`);

const still = (group, consumer) => {
  if (group.waits_for.length) return `Its reader waits for a lock that process ${group.waits_for.join(", ")} holds.`;
  if (consumer?.state === "failing") return `Its batch failed on attempt ${consumer.attempt}, and is tried again.`;
  if (consumer?.faults) return `The condition of a subscription failed for ${many(consumer.faults, "event")}, which the table pgmb.fault lists.`;
  if (!group.subscriptions) return "It has no subscription here: it gets no further events, or its events are in another database.";
  if (!consumer?.ready || ago(group.moved_at) < LONG) return null;
  if (group.reader === null) return `No process reads it: it has not advanced for ${span(ago(group.moved_at))}.`;
  return `Process ${group.reader} reads it, but it has not advanced for ${span(ago(group.moved_at))}.`;
};

const dispatching = ({ waiting, oldest_seconds: oldest, dispatcher }) => {
  if (oldest === null || oldest < LONG) return null;
  const waits = `${many(waiting, "event is", "events are")} not dispatched yet, and the oldest has waited for ${span(oldest)}`;
  if (dispatcher !== null) return `${waits}, while process ${dispatcher} dispatches: a condition may take too long.`;
  return `${waits}, and no process dispatches. Events are dispatched by feeds, handlers, streams and the maintenance DAG.`;
};

const Standing = ({ log }) =>
  h(
    Fragment,
    null,
    h(
      Box,
      { as: "dl", display: "flex", flexWrap: "wrap", columnGap: 10, rowGap: 3, mb: 3 },
      h(Fact, { name: "Last dispatch" }, h(Ago, { time: log.dispatched_at })),
      h(Fact, { name: "Events dispatched so far" }, count(log.events)),
      h(Fact, { name: "Events to dispatch" }, count(log.waiting, log.waiting < 1000)),
      h(Fact, { name: "Dispatching now" }, log.dispatcher === null ? "no process" : process(log.dispatcher, log.application)),
      h(Fact, { name: "Failed conditions", hint: "Events for which the condition of a subscription failed" }, count(log.faults, log.faults < 1000)),
      h(Fact, { name: "Last partition ends" }, log.ready_until === null ? "none" : h(Ago, { time: log.ready_until })),
    ),
    h(Stands, null, dispatching(log)),
  );

const Stands = ({ children }) => children && h(Text, { color: "orange.fg", mb: 3 }, children);

const wants = ({ subscriptions, topics, parts }) =>
  [
    count(subscriptions, subscriptions < 1000) + (subscriptions === 1 ? " subscription" : " subscriptions"),
    ...(topics.length ? [`to ${topics.join(", ")}`] : []),
    ...parts.map((part) => `part ${part}`),
  ].join(", ");

const Reader = ({ group }) =>
  group.reader === null
    ? h(Text, { color: "fg.muted" }, "no process")
    : h(
        Fragment,
        null,
        process(group.reader, group.application),
        group.connected_at && h(Text, { color: "fg.muted", fontSize: "xs" }, "connected ", h(Ago, { time: group.connected_at })),
      );

const Group = ({ group, consumer }) =>
  h(
    Table.Row,
    null,
    h(Cell, null, h(State, { word: consumer?.state ?? "unknown" })),
    h(
      Cell,
      { minW: "8rem", maxW: "22rem", overflowWrap: "anywhere" },
      h(OfConsumer, { consumer }, group.name),
      h(Text, { color: "fg.muted", fontSize: "xs", overflowWrap: "anywhere" }, wants(group)),
    ),
    h(Cell, { minW: "9rem", maxW: "18rem", overflowWrap: "anywhere" }, h(Reader, { group })),
    h(Cell, { number: true }, consumer ? about(consumer.ready, consumer.ready_exact) : UNKNOWN),
    h(Cell, { number: true }, consumer?.ready ? span(consumer.oldest_seconds) : ""),
    h(Cell, { number: true }, group.read_upto === null ? "the beginning" : h(Ago, { time: group.read_upto })),
    h(
      Cell,
      { minW: "14rem", maxW: "30rem", overflowWrap: "anywhere" },
      h(Text, { color: "orange.fg" }, still(group, consumer)),
      h(Told, { error: consumer?.error }),
    ),
  );

const size = (bytes) => {
  const units = ["kB", "MB", "GB", "TB"];
  const at = Math.min(units.length - 1, Math.max(0, Math.floor(Math.log2(Math.max(bytes, 1)) / 10) - 1));
  return `${(bytes / 1024 ** (at + 1)).toLocaleString(undefined, { maximumFractionDigits: 1 })} ${units[at]}`;
};

// Older than the retention of events that every group has read.
const partitionState = ({ state, unread }) => (state === "old" && unread.length ? "kept" : state);

const lines = (unread, line) => unread.map((one) => h(Text, { key: one.group, truncate: true, title: line(one) }, line(one)));

const Partition = ({ partition }) =>
  h(
    Table.Row,
    null,
    h(Cell, null, h(State, { word: partitionState(partition) })),
    h(Cell, { minW: "8rem", maxW: "24rem", overflowWrap: "anywhere" }, partition.name),
    h(Cell, { number: true }, partition.begins === null ? "no lower bound" : h(Ago, { time: partition.begins })),
    h(Cell, { number: true }, partition.ends === null ? "no upper bound" : h(Ago, { time: partition.ends })),
    h(Cell, { number: true }, size(partition.bytes)),
    h(Cell, { maxW: "22rem" }, partition.unread.length ? lines(partition.unread, (one) => one.group) : h(Text, { color: "fg.muted" }, "all dispatched events are read")),
    h(Cell, { number: true }, lines(partition.unread, (one) => count(one.events, one.exact))),
  );

const NoGroup = () =>
  h(
    Empty,
    null,
    h(Text, { mb: 2 }, "No group has subscribed to events here yet. The first subscription creates a group:"),
    h(Call, null, 'subscribe(connection, "billing", topical("order.paid"))'),
    h(Guide, { name: "how-to/events" }, "The guide to the event log"),
  );

const NoLog = ({ found, connection }) =>
  h(
    Empty,
    null,
    found.installed === null
      ? `Waiting for the first answer of ${connection}.`
      : h(
          Fragment,
          null,
          h(Text, { mb: 2 }, "There is no event log in this database. Install the schemas to create it:"),
          h(Call, null, `airflow-pgchange install --postgres-conn-id ${connection}`),
          h(Guide, { name: "how-to/events" }, "The guide to the event log"),
        ),
  );

const urgency = (consumers, group) => STATES.indexOf(consumers.get(group.name)?.state);

const EventLog = ({ found, title, database: { connection }, consumers }) => {
  if (found.log === null) return h(Section, { title }, h(NoLog, { found, connection }));
  // A group with its progress in another database is counted there.
  const events = consumers.filter((one) => one.kind === "event").sort((one, other) => (one.source === connection) - (other.source === connection));
  const known = new Map(events.map((one) => [one.feed.group, one]));
  const groups = [...found.groups].sort((one, other) => urgency(known, one) - urgency(known, other) || one.name.localeCompare(other.name));
  const shown = found.partitions.length;
  const some = found.log.partitions > shown ? `: the current and the oldest, ${shown} of ${count(found.log.partitions)}` : "";
  return h(
    Section,
    { title },
    h(Standing, { log: found.log }),
    groups.length
      ? h(
          Rows,
          { label: `Groups in ${connection}`, columns: GROUPS },
          groups.map((group) => h(Group, { key: group.name, group, consumer: known.get(group.name) })),
        )
      : h(NoGroup),
    h(Stands, null, found.left_out),
    shown > 0 &&
      h(
        Section,
        { title: `Partitions in ${connection}${some}` },
        h(
          Rows,
          { label: `Partitions in ${connection}`, columns: PARTITIONS },
          found.partitions.map((partition) => h(Partition, { key: `${partition.name} ${partition.begins}`, partition })),
        ),
      ),
  );
};

export const AllEventLogs = eachDatabase({ ask, title: "Event log", Shown: EventLog, isEmpty: ({ groups }) => !groups.length });
