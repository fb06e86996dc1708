// Every consumer of every feed in one table.
import { Fragment, chakra, h, useState } from "./shell.js";
import { Act, Ago, Cell, Dags, Empty, OfConsumer, Rows, Section, State, Told } from "./pieces.js";
import { Spark } from "./plot.js";
import { useAsked } from "./views.js";
import { STATES, about, asking, by, count, key, many, rate, span } from "./words.js";
import * as plans from "./plans.js";

const { Box, Button, Input, NativeSelect, Table, Text } = chakra;

const PORTION = 25;

const COLUMNS = [
  ["State", false, "state"],
  ["Consumer", false, "consumer"],
  ["Ready", true, "ready"],
  ["Waiting", true, "waiting"],
  ["Oldest", true, "oldest"],
  ["In", true, "in"],
  ["Out", true, "out"],
  ["Last hour"],
  ["Batch in work, held back by"],
  ["DAGs"],
  ["Actions"],
];

export const Batch = ({ consumer }) => {
  if (consumer.batch === null) return null;
  return h(
    Box,
    null,
    h(Text, { title: consumer.batch }, `${consumer.batch.slice(0, 8)}, attempt ${consumer.attempt}`),
    h(Text, { color: "fg.muted", fontSize: "xs" }, "claimed ", h(Ago, { time: consumer.claimed_at })),
    h(Told, { error: consumer.error }),
  );
};

export const HeldBack = ({ consumer }) =>
  consumer.held_back_by && h(Text, { color: "orange.fg" }, `held back by: ${consumer.held_back_by}`);

export const Actions = ({ consumer, confirm }) => {
  if (!consumer.may_edit) return null;
  const offered = [
    ...(consumer.batch && !consumer.at_work ? [["Skip", plans.skip]] : []),
    ...(consumer.movable
      ? [
          ["Move", plans.move],
          ["Repair", plans.repair],
          ["Drop", plans.drop],
        ]
      : []),
  ];
  return h(
    Box,
    { display: "flex", flexWrap: "wrap", gap: 1 },
    offered.map(([verb, plan]) =>
      h(
        Act,
        {
          key: verb,
          label: `${verb} ${consumer.consumer}`,
          danger: verb === "Drop",
          onClick: () => confirm(plan(consumer)),
        },
        verb,
      ),
    ),
  );
};

const unknown = (number) =>
  number === null ? "Not known: nobody has looked for long enough, or the number of ready changes is not exact" : undefined;

const Row = ({ consumer, confirm }) =>
  h(
    Table.Row,
    null,
    h(Cell, null, h(State, { word: consumer.state })),
    h(
      Cell,
      { minW: "8rem", maxW: "22rem" },
      h(OfConsumer, { consumer }, consumer.consumer),
      h(
        Text,
        { color: "fg.muted", fontSize: "xs", overflowWrap: "anywhere" },
        `${consumer.kind} in ${consumer.connection}`,
        consumer.source && `, changes in ${consumer.source}`,
      ),
    ),
    h(Cell, { number: true }, about(consumer.ready, consumer.ready_exact)),
    h(Cell, { number: true }, count(consumer.waiting)),
    h(Cell, { number: true }, span(consumer.oldest_seconds)),
    h(Cell, { number: true, title: unknown(consumer.rate_in) }, rate(consumer.rate_in)),
    h(Cell, { number: true, title: unknown(consumer.rate_out) }, rate(consumer.rate_out)),
    h(Cell, null, h(Spark, { name: consumer.consumer, values: consumer.trend })),
    h(
      Cell,
      { minW: "11rem", maxW: "28rem", overflowWrap: "anywhere" },
      h(Batch, { consumer }),
      h(HeldBack, { consumer }),
    ),
    h(Dags, { dags: consumer.dags }),
    h(Cell, { minW: "9.5rem" }, h(Actions, { consumer, confirm })),
  );

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
        h("option", { value: "" }, "Every state"),
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
            ? "No consumer fits the filter."
            : (asking(databases) ?? "No consumer has begun here yet: the first claim makes one."),
        ),
  );
};
