// The actions of a person, with the texts that explain them before they are done.
import { act } from "./api.js";
import { about, count, many } from "./words.js";

const one = (consumer, action, body = {}) =>
  act(consumer.connection, `consumers/${action}`, { consumer: consumer.consumer, ...body }, consumer.source);

export const skip = (consumer) => ({
  title: `Skip the batch of ${consumer.consumer}?`,
  lines: [
    `Batch ${consumer.batch}, tried ${many(consumer.attempt ?? 1, "time")}, is given up and kept as a dead letter ` +
      `in ${consumer.connection}. ${consumer.consumer} continues with the next changes.`,
    ...(consumer.error ? [`It failed with: ${consumer.error}`] : []),
  ],
  fields: [{ name: "reason", label: "Why it is given up (required; it is kept with the letter)" }],
  verb: "Skip the batch",
  run: ({ reason }) => one(consumer, "skip", { reason }),
});

export const release = (consumer) => ({
  title: `End the lease of ${consumer.consumer}?`,
  lines: [
    `${consumer.leased_by || "A job"} processes its batch, and has a lease until ${new Date(consumer.leased_until).toLocaleString()}.`,
    "The batch can be claimed again at once. After that, the results of this job are refused. The job itself is not ended.",
  ],
  verb: "End the lease",
  danger: true,
  run: () => one(consumer, "release"),
});

export const move = (consumer) => ({
  title: `Move ${consumer.consumer}?`,
  lines: [
    `${consumer.consumer} will continue from another point. If it moves forward, the changes in between are skipped; if ` +
      "it moves back, they are processed again.",
    `Ready for it now: ${about(consumer.ready, consumer.ready_exact)}; waiting: ${count(consumer.waiting)}.`,
  ],
  fields: [
    {
      name: "to",
      label: "New position",
      value: "now",
      choices: [
        ["now", "Now: all existing changes count as processed"],
        ["beginning", "The beginning: all changes that are still kept are processed again"],
        ["time", "A time: changes that were written before it count as processed"],
      ],
    },
    { name: "time", label: "Time (in your time zone)", type: "datetime-local", when: (values) => values.to === "time" },
  ],
  verb: "Move it",
  danger: true,
  run: ({ to, time }) => one(consumer, "move", { to: to === "time" ? new Date(time).toISOString() : to }),
});

export const repair = (consumer) => ({
  title: `Repair ${consumer.consumer}?`,
  lines: [
    `${consumer.consumer} will continue from the progress that its source has recorded. Some batches may be processed again.`,
  ],
  verb: "Repair it",
  run: () => one(consumer, "repair"),
});

export const drop = (consumer) => ({
  title: `Drop ${consumer.consumer}?`,
  lines: [
    `Its progress, its batch in work and its dead letters in ${consumer.connection} will be deleted. A consumer of the ` +
      "same name would start from the beginning.",
  ],
  verb: "Drop it",
  danger: true,
  run: () => one(consumer, "drop"),
});

const named = (letters) => `letter${letters.length === 1 ? "" : "s"} ${letters.map((letter) => letter.id).join(", ")}`;

export const redrive = (connection, letters, source) => ({
  title: `Send ${named(letters)} again?`,
  lines: letters.map(
    (letter) => `${many(letter.changes, "change")} of letter ${letter.id} will be sent to ${letter.consumer} again, and to no other consumer.`,
  ),
  verb: "Send again",
  run: () => act(connection, "letters/redrive", { ids: letters.map((letter) => letter.id) }, source),
});

export const dropLetters = (connection, letters) => ({
  title: `Drop ${named(letters)}?`,
  lines: letters.map(
    (letter) => `${many(letter.changes, "change")} that ${letter.consumer} gave up will be lost for this consumer.`,
  ),
  verb: "Drop",
  danger: true,
  run: () => act(connection, "letters/drop", { ids: letters.map((letter) => letter.id) }),
});

const EVERY = "*";

export const eraseLetters = (connection, consumers) => ({
  title: `Erase a key from the dead letters in ${connection}?`,
  lines: [
    "The data of this key will be erased from letters, and will not be sent again. A letter without any data left is dropped. " +
      "Errors and reasons that contain the key are replaced.",
    "Airflow's audit log records the key and the user.",
  ],
  fields: [
    {
      name: "by",
      label: "The key is",
      value: "id",
      choices: [
        ["id", "the id of a message, an event or a row"],
        ["field", "the value of a field of a message, an event or a touch"],
      ],
    },
    { name: "field", label: "Field, such as customer.mail", when: (values) => values.by === "field" },
    { name: "key", label: "Key" },
    {
      name: "consumer",
      label: "Letters of",
      value: EVERY,
      options: [[EVERY, "every consumer"], ...consumers.map((consumer) => [consumer, consumer])],
    },
  ],
  verb: "Erase it",
  danger: true,
  run: ({ by, field, key, consumer }) =>
    act(connection, "letters/erase", {
      key,
      field: by === "field" ? field : null,
      consumer: consumer === EVERY ? null : consumer,
    }),
});

export const WORDS = { pause: "Pause", resume: "Resume", cancel: "Cancel" };

const MEANS = {
  pause: "It stops after the current chunk, until somebody resumes it. New changes of the table are still captured and processed.",
  resume: "It continues where it stopped, with the worker's next run.",
  cancel: "It cannot be resumed. Rows that it has read are still processed, and no row is removed from the copy. A new backfill starts from the beginning.",
};

export const bring = (connection, backfill, verb) => ({
  title: `${WORDS[verb]} backfill ${backfill.id} of ${backfill.table}?`,
  lines: [
    MEANS[verb],
    `It has read ${backfill.looked_at.toLocaleString()} of about ${many(backfill.total, "row")}, and sent ` +
      `${many(backfill.touched, "id")} to the workers.`,
  ],
  verb: `${WORDS[verb]} it`,
  dismiss: "Leave it as it is",
  danger: verb === "cancel",
  run: () => act(connection, `backfills/${backfill.id}/${verb}`, {}),
});

export const backfill = (connection, tables) => ({
  title: `Start a backfill in ${connection}?`,
  lines: [
    "All rows of the table are sent to the workers of its tube, chunk by chunk, in the order of their ids. Changes that are made " +
      "meanwhile are processed first. At the end, rows that only the copy has are removed from it.",
    "The backfill starts with the next run of the tube's workers (TubeGarbageCollectOperator). If the table has an unfinished " +
      "backfill, that backfill continues where it stopped.",
  ],
  fields: [
    {
      name: "table",
      label: "Table to backfill",
      value: "0",
      options: tables.map(({ tube, table }, place) => [String(place), `${table} into tube ${tube}`]),
    },
  ],
  verb: "Start it",
  run: ({ table }) => act(connection, "backfills/start", tables[Number(table)]),
});

export const maintenance = (connection) => ({
  title: `Run maintenance of ${connection}?`,
  lines: [
    "Maintenance creates partitions, repairs captures, dispatches scheduled events and drops leftovers, as the maintenance " +
      "DAG does. It trims no history.",
  ],
  verb: "Run maintenance",
  run: () => act(connection, "maintenance", {}),
});
