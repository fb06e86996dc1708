// A consumer: its state, its last hour as a chart, and the batches of its last day.
import { Fragment, chakra, h, useCallback, useSearchParams } from "./shell.js";
import { history as ask, useLive } from "./api.js";
import { Actions, Batch, HINTS, HeldBack, NO_RATE, Why } from "./consumers.js";
import { Ago, DagLinks, DagReasons, Empty, Fact, Section, State, Told } from "./pieces.js";
import { Cell, Rows } from "./table.js";
import { Plot, aboveNumber, aboveSpan } from "./plot.js";
import { To, at, atRun } from "./views.js";
import { UNKNOWN, about, asking, count, key, many, rate, span } from "./words.js";

const { Box, Heading, Table, Text } = chakra;

const COLUMNS = [
  ["Outcome"],
  ["Batch"],
  ["Attempt", true],
  ["Changes", true],
  ["Claimed", true],
  ["Duration", true, null, { hint: "From the claim to the commit" }],
  ["Phases"],
  ["Written"],
  ["Task"],
  ["Error"],
];

const LINES = [
  { name: "ready", colour: "blue-fg", value: (sample) => sample.ready },
  { name: "waiting", colour: "orange-fg", value: (sample) => sample.waiting },
];
const AGE = [{ name: "oldest", colour: "purple-fg", value: (sample) => sample.oldest_seconds ?? (sample.ready === null ? null : 0) }];

const number = (value) => Math.round(value).toLocaleString();

const isInWork = ({ batch, attempt }, consumer) => consumer.at_work && batch === consumer.batch && attempt === consumer.attempt;

const end = (attempt, consumer) => {
  if (isInWork(attempt, consumer)) return ["in work", null];
  if (attempt.acked_at) return ["committed", attempt.acked_at];
  if (attempt.skipped_at) return ["skipped", attempt.skipped_at];
  if (attempt.split_at) return ["split", attempt.split_at];
  if (attempt.failed_at) return ["failed", attempt.failed_at];
  return ["no outcome", null];
};

const took = (attempt) =>
  attempt.acked_at && attempt.claimed_at
    ? `${((Date.parse(attempt.acked_at) - Date.parse(attempt.claimed_at)) / 1000).toFixed(2)} s`
    : "";

const PHASES = ["claim", "start", "process", "merge"];
const order = ([phase]) => (PHASES.includes(phase) ? PHASES.indexOf(phase) : PHASES.length);

const phases = (seconds) =>
  Object.entries(seconds)
    .sort((one, other) => order(one) - order(other))
    .map(([phase, each]) => `${phase}\u00a0${each.toFixed(2)}\u00a0s`)
    .join(", ");

const Output = ({ output }) =>
  h(
    Box,
    { title: output.location ?? undefined },
    `${output.target}: ${many(output.rows, "row")}`,
    output.version !== null && h(Text, { color: "fg.muted", fontSize: "xs" }, `version ${output.version}`),
  );

// The attempt that succeeded.
const Run = ({ run }) =>
  h(
    Fragment,
    null,
    h(To, { to: atRun(run) }, run.map_index < 0 ? run.task_id : `${run.task_id} [${run.map_index}]`),
    h(Text, { color: "fg.muted", fontSize: "xs" }, `${run.dag_id}, ${run.run_id}, try ${run.try_number}`),
  );

const Attempt = ({ attempt, consumer }) => {
  const [word, time] = end(attempt, consumer);
  return h(
    Table.Row,
    null,
    h(Cell, null, h(State, { word }), time && h(Text, { color: "fg.muted", fontSize: "xs" }, h(Ago, { time }))),
    h(Cell, { title: attempt.batch }, attempt.batch.slice(0, 8)),
    h(Cell, { number: true }, attempt.attempt),
    h(Cell, { number: true }, attempt.changes.toLocaleString()),
    h(Cell, { number: true }, h(Ago, { time: attempt.claimed_at })),
    h(Cell, { number: true }, took(attempt)),
    h(Cell, { minW: "12rem" }, phases(attempt.seconds)),
    h(
      Cell,
      { minW: "10rem", overflowWrap: "anywhere" },
      attempt.outputs.map((output, place) => h(Output, { key: place, output })),
    ),
    h(Cell, { minW: "8rem", maxW: "20rem", overflowWrap: "anywhere" }, attempt.run && h(Run, { run: attempt.run })),
    h(Cell, { minW: "12rem", maxW: "26rem", overflowWrap: "anywhere" }, h(Told, { error: attempt.error })),
  );
};

const Standing = ({ consumer, confirm }) =>
  h(
    Fragment,
    null,
    h(
      Box,
      { display: "flex", flexWrap: "wrap", gap: 3, alignItems: "center", mt: 4 },
      h(State, { word: consumer.state }),
      h(Heading, { as: "h2", size: "lg", overflowWrap: "anywhere", flex: "1 1 14rem" }, consumer.consumer),
      h(Actions, { consumer, confirm }),
    ),
    h(
      Text,
      { color: "fg.muted", fontSize: "sm" },
      `${consumer.kind} in ${consumer.connection}${consumer.source ? `, changes in ${consumer.source}` : ""}`,
    ),
    h(
      Box,
      { as: "dl", display: "flex", flexWrap: "wrap", columnGap: 10, rowGap: 3, my: 4 },
      h(Fact, { name: "Ready changes", hint: HINTS.ready }, about(consumer.ready, consumer.ready_exact)),
      h(Fact, { name: "Waiting changes", hint: HINTS.waiting }, count(consumer.waiting)),
      h(Fact, { name: "Oldest", hint: HINTS.oldest }, consumer.ready === 0 ? "none" : span(consumer.oldest_seconds) || UNKNOWN),
      h(Fact, { name: "Arrived", hint: consumer.rate_in === null ? NO_RATE : HINTS.arrived }, rate(consumer.rate_in)),
      h(Fact, { name: "Processed", hint: consumer.rate_out === null ? NO_RATE : HINTS.processed }, rate(consumer.rate_out)),
      consumer.faults !== null && h(Fact, { name: "Faults", hint: "Changes on which a predicate, a condition or a selector of the feed failed" }, count(consumer.faults)),
      consumer.batch !== null && h(Fact, { name: "Batch in work" }, h(Batch, { consumer })),
      consumer.dags.length > 0 && h(Fact, { name: "DAGs" }, h(DagLinks, { dags: consumer.dags })),
    ),
    h(HeldBack, { consumer }),
    h(Why, { consumer }),
    h(DagReasons, { reasons: consumer.dag_reasons }),
  );

const Past = ({ consumer }) => {
  const { connection, source, kind, consumer: name } = consumer;
  const { said, failure } = useLive(useCallback(() => ask({ connection, source, kind, consumer: name }), [connection, source, kind, name]));
  const problem = failure ?? said?.failure;
  if (said === null) return problem && h(Empty, null, problem);
  const samples = said.samples.map((sample) => ({ ...sample, time: Date.parse(sample.at) }));
  const title = "Batches of the last day";
  return h(
    Fragment,
    null,
    problem && h(Text, { role: "alert", color: "red.fg", mb: 3 }, problem),
    h(
      Section,
      { title: "The last hour" },
      samples.length
        ? h(
            Fragment,
            null,
            h(Plot, { title: "Changes", samples, series: LINES, told: number, above: aboveNumber }),
            h(Plot, { title: "Age", samples, series: AGE, told: span, above: aboveSpan }),
          )
        : h(Empty, null, "There are no samples yet. The lag is recorded every five seconds while these pages are open, and for an hour after."),
    ),
    h(
      Section,
      { title: said.attempts.length ? `${title}: ${many(said.attempts.length, "attempt")}` : title },
      said.attempts.length
        ? h(
            Rows,
            { label: title, columns: COLUMNS },
            said.attempts.map((attempt) => h(Attempt, { key: `${attempt.batch} ${attempt.attempt}`, attempt, consumer })),
          )
        : h(
            Empty,
            null,
            "No batch of the last day is shown: the consumer claimed none, or the role of the connection has no rights for feeds of this kind.",
          ),
    ),
  );
};

export const Consumer = ({ said, confirm }) => {
  const [asked] = useSearchParams();
  const fits = (one) => ["connection", "kind", "consumer"].every((name) => one[name] === asked.get(name)) && (one.source ?? "") === (asked.get("source") ?? one.source ?? "");
  const consumer = said.consumers.find(fits);
  return h(
    Box,
    { mt: 4 },
    h(To, { to: at() }, "All consumers"),
    consumer
      ? h(Fragment, null, h(Standing, { consumer, confirm }), h(Past, { key: key(consumer), consumer }))
      : h(
          Box,
          { mt: 4 },
          h(
            Empty,
            null,
            asking(said.databases) ??
              `There is no consumer ${asked.get("consumer") ?? ""} here that you may see: it has not begun, was dropped, or ` +
                "its database does not answer.",
          ),
        ),
  );
};
