// What a person can do, and what it means, in the words that are read before it is done.
import { act } from "./api.js";
import { about, count, many } from "./words.js";

const one = (consumer, action, body = {}) =>
  act(consumer.connection, `consumers/${action}`, { consumer: consumer.consumer, ...body }, consumer.source);

export const skip = (consumer) => ({
  title: `Skip the batch of ${consumer.consumer}?`,
  lines: [
    `Batch ${consumer.batch}, tried ${many(consumer.attempt ?? 1, "time")}, is given up and kept as a dead letter ` +
      `in ${consumer.connection}. ${consumer.consumer} goes on with what comes after it.`,
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
    "The batch can be claimed again at once. As soon as it is, the results of that job are refused. The job itself is not ended.",
  ],
  verb: "End the lease",
  danger: true,
  run: () => one(consumer, "release"),
});

export const move = (consumer) => ({
  title: `Move ${consumer.consumer}?`,
  lines: [
    `${consumer.consumer} will go on from another point: what lies between is left out where it goes forward, and ` +
      "comes again where it goes back.",
    `Ready for it now: ${about(consumer.ready, consumer.ready_exact)}; waiting: ${count(consumer.waiting)}.`,
  ],
  fields: [
    {
      name: "to",
      label: "Where to",
      value: "now",
      choices: [
        ["now", "Now: all that is there counts as processed"],
        ["beginning", "The beginning: all that is still kept comes again"],
        ["time", "A time: what was written before it counts as processed"],
      ],
    },
    { name: "time", label: "Time (yours)", type: "datetime-local", when: (values) => values.to === "time" },
  ],
  verb: "Move it",
  danger: true,
  run: ({ to, time }) => one(consumer, "move", { to: to === "time" ? new Date(time).toISOString() : to }),
});

export const repair = (consumer) => ({
  title: `Repair ${consumer.consumer}?`,
  lines: [
    `${consumer.consumer} will go on from what the source still knows of it. Batches that were processed may come again.`,
  ],
  verb: "Repair it",
  run: () => one(consumer, "repair"),
});

export const drop = (consumer) => ({
  title: `Forget ${consumer.consumer}?`,
  lines: [
    `Its progress, its batch in work and its dead letters in ${consumer.connection} will be gone. A consumer of the ` +
      "same name would begin anew.",
  ],
  verb: "Forget it",
  danger: true,
  run: () => one(consumer, "drop"),
});

const named = (letters) => `letter${letters.length === 1 ? "" : "s"} ${letters.map((letter) => letter.id).join(", ")}`;

export const redrive = (connection, letters, source) => ({
  title: `Send ${named(letters)} again?`,
  lines: letters.map(
    (letter) => `${many(letter.changes, "change")} of letter ${letter.id} will come to ${letter.consumer} again, and to nobody else.`,
  ),
  verb: "Send again",
  run: () => act(connection, "letters/redrive", { ids: letters.map((letter) => letter.id) }, source),
});

export const dropLetters = (connection, letters) => ({
  title: `Drop ${named(letters)}?`,
  lines: letters.map(
    (letter) => `${many(letter.changes, "change")} that ${letter.consumer} gave up will be gone for it.`,
  ),
  verb: "Drop",
  danger: true,
  run: () => act(connection, "letters/drop", { ids: letters.map((letter) => letter.id) }),
});

const EVERY = "*";

export const eraseLetters = (connection, consumers) => ({
  title: `Erase a key from the dead letters in ${connection}?`,
  lines: [
    "What letters hold of this key will be gone, and will not be sent again with them. A letter of which nothing is left is dropped. " +
      "An error or a reason that names the key is replaced.",
    "Airflow's audit log notes the key, and who had it erased.",
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
  pause: "It stays where it is behind the chunk in work, until somebody resumes it. Changes come to the tube as before.",
  resume: "It goes on where it stopped, with the next run of whoever carries it out.",
  cancel: "It is given up for good: what it touched stays touched, and nothing is given up downstream. Another one begins anew.",
};

export const bring = (connection, backfill, verb) => ({
  title: `${WORDS[verb]} backfill ${backfill.id} of ${backfill.table}?`,
  lines: [
    MEANS[verb],
    `It has looked at ${backfill.looked_at.toLocaleString()} of about ${many(backfill.total, "row")}, and touched ` +
      `${many(backfill.touched, "id")}.`,
  ],
  verb: `${WORDS[verb]} it`,
  dismiss: "Leave it as it is",
  danger: verb === "cancel",
  run: () => act(connection, `backfills/${backfill.id}/${verb}`, {}),
});

export const backfill = (connection, tables) => ({
  title: `Start a backfill in ${connection}?`,
  lines: [
    "All rows of a table are touched in the order of its ids, chunk by chunk, behind what changes meanwhile; at its end, what the " +
      "copy has and the table has not is removed from the copy.",
    "The workers of the tube are asked for it, and begin with their next run (TubeGarbageCollectOperator). One of the table that " +
      "is not finished goes on where it stopped.",
  ],
  fields: [
    {
      name: "table",
      label: "Which table",
      value: "0",
      options: tables.map(({ tube, table }, place) => [String(place), `${table} into tube ${tube}`]),
    },
  ],
  verb: "Start it",
  run: ({ table }) => act(connection, "backfills/start", tables[Number(table)]),
});

export const maintenance = (connection) => ({
  title: `Look after ${connection}?`,
  lines: [
    "Partitions are made ahead, captures mended, scheduled events dispatched and leftovers dropped, as the maintenance " +
      "DAG does. Nothing is trimmed.",
  ],
  verb: "Run maintenance",
  run: () => act(connection, "maintenance", {}),
});
