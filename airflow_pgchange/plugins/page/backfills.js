// Backfills of tubes: their progress, and the actions of a person.
import { chakra, h } from "./shell.js";
import { backfills as ask } from "./api.js";
import { eachDatabase } from "./each.js";
import { Act, Ago, Empty, Name, Section, State } from "./pieces.js";
import { ACTIONS, Cell, Rows } from "./table.js";
import { To, at } from "./views.js";
import { UNKNOWN, about, many, rate, span } from "./words.js";
import * as plans from "./plans.js";

const { Box, Table, Text } = chakra;

const COLUMNS = [
  ["State"],
  ["Table"],
  ["Progress"],
  ["Rows", true],
  ["Time left", true],
  ["To process", true, null, { hint: "Changes of the whole tube that its workers must still process, including the rows of this backfill" }],
  ["Began"],
  ACTIONS,
];

const OPEN = ["scheduled", "running", "paused"];

const Bar = ({ backfill }) =>
  h(
    Box,
    { display: "flex", gap: 2, alignItems: "center", minW: "8rem" },
    h(
      Box,
      {
        role: "progressbar",
        "aria-label": `Backfill ${backfill.id} of ${backfill.table}`,
        "aria-valuemin": 0,
        "aria-valuemax": 100,
        "aria-valuenow": backfill.percent,
        flex: "1",
        h: "8px",
        bg: "bg.emphasized",
        borderRadius: "full",
        overflow: "hidden",
      },
      h(Box, { h: "100%", bg: backfill.state === "running" ? "blue.solid" : "gray.solid", style: { width: `${backfill.percent}%` } }),
    ),
    h(Text, { fontVariantNumeric: "tabular-nums", minW: "3.5rem", textAlign: "end" }, `${backfill.percent.toLocaleString()} %`),
  );

// A chunk takes seconds. After this time without a chunk, no process carries the backfill out.
const RESTS = 120;

const rest = (backfill) => {
  const since = (Date.now() - Date.parse(backfill.updated_at)) / 1000;
  if (backfill.state === "scheduled") return "No worker has started it yet.";
  if (backfill.state !== "running" || since < RESTS) return null;
  return `No chunk for ${span(since)}: no worker runs it now.`;
};

const rows = ({ state, looked_at: behind, total }) =>
  state === "done" ? behind.toLocaleString() : `${behind.toLocaleString()} of about ${total.toLocaleString()}`;

const left = (seconds) => (seconds !== null && seconds < 1 ? "< 1 s" : span(seconds));

// The changes that its workers must still process. They are counted for the whole tube.
const replay = (backfill, consumers) => {
  const workers = consumers.filter((one) => one.kind === "tube" && one.feed.tube === backfill.tube);
  if (!workers.length || workers.some((one) => one.ready === null)) return UNKNOWN;
  const ready = workers.reduce((sum, one) => sum + one.ready, 0);
  return about(ready, workers.every((one) => one.ready_exact));
};

const Row = ({ backfill, connection, consumers, mayEdit, confirm }) => {
  const verbs = {
    scheduled: ["pause", "cancel"],
    running: ["pause", "cancel"],
    paused: ["resume", "cancel"],
  }[backfill.state];
  return h(
    Table.Row,
    null,
    h(Cell, null, h(State, { word: backfill.state })),
    h(
      Cell,
      { minW: "8rem", maxW: "18rem", overflowWrap: "anywhere" },
      h(Name, null, backfill.table),
      h(
        Text,
        { color: "fg.muted", fontSize: "xs" },
        `backfill ${backfill.id} into `,
        h(To, { to: at("", { text: `tube:${backfill.tube}/` }) }, backfill.tube),
        `, by ${backfill.order}`,
      ),
      rest(backfill) && h(Text, { color: "orange.fg", fontSize: "xs" }, rest(backfill)),
      backfill.message && h(Text, { color: backfill.state === "failed" ? "red.fg" : "fg.muted", fontSize: "xs", overflowWrap: "anywhere" }, backfill.message),
    ),
    h(Cell, null, h(Bar, { backfill })),
    h(
      Cell,
      { number: true },
      rows(backfill),
      backfill.rate !== null && h(Text, { color: "fg.muted", fontSize: "xs" }, `at ${rate(backfill.rate)}`),
    ),
    h(Cell, { number: true }, rest(backfill) ? "" : left(backfill.remaining_seconds)),
    h(Cell, { number: true }, replay(backfill, consumers)),
    h(
      Cell,
      { whiteSpace: "nowrap" },
      h(Ago, { time: backfill.started_at }),
      h(Text, { color: "fg.muted", fontSize: "xs" }, `by role ${backfill.started_by}`),
      backfill.finished_at && h(Text, { color: "fg.muted", fontSize: "xs" }, "ended ", h(Ago, { time: backfill.finished_at })),
    ),
    h(
      Cell,
      { pinned: true },
      mayEdit &&
        h(
          Box,
          { display: "flex", flexWrap: "wrap", gap: 1 },
          verbs?.map((verb) =>
            h(
              Act,
              {
                key: verb,
                label: `${plans.WORDS[verb]} backfill ${backfill.id}`,
                danger: verb === "cancel",
                onClick: () => confirm(plans.bring(connection, backfill, verb)),
              },
              plans.WORDS[verb],
            ),
          ),
        ),
    ),
  );
};

const Backfills = ({ found, title, database: { connection, may_edit: mayEdit }, consumers, confirm }) => {
  const open = found.backfills.filter((one) => OPEN.includes(one.state)).length;
  const aside =
    mayEdit &&
    found.tables.length > 0 &&
    h(
      Act,
      { label: `Start a backfill in ${connection}`, onClick: () => confirm(plans.backfill(connection, found.tables)) },
      "Start a backfill",
    );
  return h(
    Section,
    { title: found.backfills.length ? `${title}: ${many(open, "is", "are")} not finished` : title, aside },
    found.backfills.length
      ? h(
          Rows,
          { label: title, columns: COLUMNS },
          found.backfills.map((backfill) =>
            h(Row, {
              key: backfill.id,
              backfill,
              connection,
              consumers: consumers.filter((one) => one.connection === connection),
              mayEdit,
              confirm,
            }),
          ),
        )
      : h(
          Empty,
          null,
          found.tables.length
            ? "No table has been backfilled here. A backfill sends all rows of a table to the workers of a tube, chunk by chunk."
            : "No table that you may see is attached to a tube here. Only attached tables can be backfilled.",
        ),
  );
};

export const AllBackfills = eachDatabase({ ask, title: "Backfills", Shown: Backfills, isEmpty: ({ backfills }) => !backfills.length });
