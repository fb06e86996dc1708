// Every consumer of every feed in one table.
import { Fragment, chakra, h, useState } from "./shell.js";
import { Act, ActionMenu, Ago, DagLine, DagReasons, Empty, OfConsumer, Section, State, Told } from "./pieces.js";
import { ACTIONS, Amount, Cell, Rows } from "./table.js";
import { Spark } from "./plot.js";
import { useAsked } from "./views.js";
import { STATES, about, asking, by, count, key, many, rate, span } from "./words.js";
import * as plans from "./plans.js";

const { Box, Button, Input, NativeSelect, Table, Text } = chakra;

const PORTION = 25;

const RATE = "changes/s";

export const HINTS = {
  ready: "Changes that the next claim would return",
  waiting: "Changes that cannot be claimed yet: they wait for a transaction, for a time, or for other changes",
  oldest: "How long the oldest ready change has waited",
  arrived: "Changes that arrived per second, over the last five minutes",
  processed: "Changes that were processed per second, over the last five minutes",
  hour: "How many changes were ready in the last hour, a point every two minutes",
};

const COLUMNS = [
  ["State", false, "state"],
  ["Consumer", false, "consumer"],
  ["Ready", true, "ready", { unit: "changes", hint: HINTS.ready }],
  ["Waiting", true, "waiting", { unit: "changes", hint: HINTS.waiting }],
  ["Oldest", true, "oldest", { unit: "age", hint: HINTS.oldest }],
  ["Arrived", true, "in", { unit: RATE, hint: HINTS.arrived }],
  ["Processed", true, "out", { unit: RATE, hint: HINTS.processed }],
  ["Last hour", false, null, { unit: "changes", hint: HINTS.hour }],
  ACTIONS,
];

const Lease = ({ consumer }) =>
  consumer.leased_until &&
  h(
    Text,
    { color: "fg.muted", fontSize: "xs", overflowWrap: "anywhere" },
    `leased${consumer.leased_by ? ` by ${consumer.leased_by}` : ""} until ${new Date(consumer.leased_until).toLocaleString()}`,
  );

export const Batch = ({ consumer }) => {
  if (consumer.batch === null) return null;
  return h(
    Box,
    null,
    h(
      Text,
      { fontSize: "xs", overflowWrap: "anywhere", title: consumer.batch },
      `batch ${consumer.batch.slice(0, 8)}, ${consumer.part_of ? `part of ${consumer.part_of.slice(0, 8)}, ` : ""}attempt ${consumer.attempt}, claimed `,
      h(Ago, { time: consumer.claimed_at }),
    ),
    h(Lease, { consumer }),
    h(Told, { error: consumer.error }),
  );
};

export const HeldBack = ({ consumer }) =>
  consumer.held_back_by &&
  h(Text, { color: "orange.fg", fontSize: "xs", lineClamp: 6, overflowWrap: "anywhere", title: consumer.held_back_by }, `held back by: ${consumer.held_back_by}`);

// Why a consumer is behind, or where it starts. Leave out the transaction that holds it back, because another line names it.
export const Why = ({ consumer }) => {
  const { why, held_back_by: held } = consumer;
  const rest = held && why?.startsWith(held) ? why.slice(held.length).replace(/^; /, "") : why;
  const told = consumer.new ?? (rest && `behind: ${rest}`);
  return told && h(Text, { color: "fg.muted", fontSize: "xs", lineClamp: 6, overflowWrap: "anywhere", title: told }, told);
};

// The actions that are possible for a consumer now: [[verb, function, whether it destroys something]].
const offered = (consumer, confirm) => {
  if (!consumer.may_edit) return [];
  const verbs = [
    ...(consumer.batch && !consumer.at_work ? [["Skip", plans.skip]] : []),
    ...(consumer.leased_until ? [["End lease", plans.release]] : []),
    ...(consumer.movable
      ? [
          ["Move", plans.move],
          ["Repair", plans.repair],
          ["Drop", plans.drop],
        ]
      : []),
  ];
  return verbs.map(([verb, plan]) => [verb, () => confirm(plan(consumer)), verb === "Drop"]);
};

export const Actions = ({ consumer, confirm }) =>
  h(
    Box,
    { display: "flex", flexWrap: "wrap", gap: 1 },
    offered(consumer, confirm).map(([verb, act, destroys]) =>
      h(Act, { key: verb, label: `${verb} ${consumer.consumer}`, danger: destroys, onClick: act }, verb),
    ),
  );

export const NO_RATE =
  "Unknown: there are too few samples yet, the number of ready changes is an estimate, or the role of the " +
  "connection has no rights for feeds of this kind";
const NO_LAG = "Unknown: the changes are in another database, which no DAG names together with this consumer or which you may not see";

const Place = ({ consumer }) =>
  h(
    Text,
    { color: "fg.muted", fontSize: "xs", overflowWrap: "anywhere" },
    `${consumer.kind} in ${consumer.connection}`,
    consumer.source && `, changes in ${consumer.source}`,
  );

const Row = ({ consumer, confirm }) => {
  const actions = offered(consumer, confirm);
  return h(
    Table.Row,
    null,
    h(Cell, null, h(State, { word: consumer.state })),
    h(
      Cell,
      { minW: "12rem", w: "100%" },
      h(OfConsumer, { consumer }, consumer.consumer),
      h(Place, { consumer }),
      h(DagLine, { dags: consumer.dags }),
      h(Batch, { consumer }),
      h(HeldBack, { consumer }),
      !consumer.batch && h(Why, { consumer }),
      // The line of DAGs already shows which are paused.
      h(DagReasons, { reasons: consumer.dag_reasons.filter(({ run }) => run !== null) }),
    ),
    h(Amount, { known: consumer.ready !== null, why: NO_LAG }, about(consumer.ready, consumer.ready_exact)),
    h(Amount, { known: consumer.waiting !== null, why: NO_LAG }, count(consumer.waiting)),
    h(Cell, { number: true }, consumer.ready === 0 ? "" : span(consumer.oldest_seconds)),
    h(Amount, { known: consumer.rate_in !== null, why: NO_RATE }, rate(consumer.rate_in)),
    h(Amount, { known: consumer.rate_out !== null, why: NO_RATE }, rate(consumer.rate_out)),
    h(Cell, null, h(Spark, { name: consumer.consumer, values: consumer.trend })),
    h(Cell, { pinned: true }, h(ActionMenu, { label: `Actions for ${consumer.consumer}`, offered: actions })),
  );
};

export const Consumers = ({ said, confirm }) => {
  const { consumers, databases } = said;
  const [asked, change] = useAsked();
  const [most, setMost] = useState(PORTION);
  const text = asked.get("text") ?? "";
  const state = asked.get("state") ?? "";
  const order = asked.get("sort") ?? "";
  const fits = (one) =>
    (!state || one.state === state) &&
    [one.consumer, one.kind, one.connection, ...one.dags].join(" ").toLowerCase().includes(text.toLowerCase());
  const shown = consumers.filter(fits).sort(by(order || "state"));
  const aside = h(
    Box,
    { display: "flex", gap: 2 },
    h(Input, {
      size: "sm",
      type: "search",
      "aria-label": "Filter consumers",
      placeholder: "Filter",
      value: text,
      onChange: (event) => change({ text: event.target.value }),
    }),
    h(
      NativeSelect.Root,
      { size: "sm", width: "11rem", flexShrink: 0 },
      h(
        NativeSelect.Field,
        { "aria-label": "State", value: state, onChange: (event) => change({ state: event.target.value }) },
        h("option", { value: "" }, "All states"),
        STATES.map((one) => h("option", { key: one, value: one }, one)),
      ),
      h(NativeSelect.Indicator),
    ),
  );
  const title = shown.length === consumers.length ? many(shown.length, "consumer") : `${shown.length} of ${many(consumers.length, "consumer")}`;
  return h(
    Section,
    { title, aside },
    shown.length
      ? h(
          Fragment,
          null,
          h(
            Rows,
            { label: "Consumers", columns: COLUMNS, sort: { order, choose: (sort) => change({ sort }) } },
            shown.slice(0, most).map((consumer) => h(Row, { key: key(consumer), consumer, confirm })),
          ),
          shown.length > most &&
            h(
              Button,
              { size: "sm", variant: "ghost", mt: 2, onClick: () => setMost(most + PORTION) },
              `Show ${Math.min(PORTION, shown.length - most)} more of ${shown.length - most}`,
            ),
        )
      : h(
          Empty,
          null,
          consumers.length
            ? "No consumer matches the filter."
            : (asking(databases) ?? "There is no consumer yet. A consumer appears here when a DAG names it, or when it claims its first batch."),
        ),
  );
};
