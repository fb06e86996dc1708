// The flow of changes from feeds through consumers and their DAGs to the targets, in plain SVG with the shell's colours. Each
// consumer and each DAG is a link. Its name describes the picture in words.
import { Link, chakra, h, useContext } from "./shell.js";
import { LOOKS, Paused, Section } from "./pieces.js";
import { atConsumer, atDag } from "./views.js";
import { about, by, key, many, span } from "./words.js";

const { Box, Text } = chakra;

// The maximum that stays readable. The consumers that need a person most are shown.
const MOST = 40;
const BOX = { width: 216, height: 36, down: 8 };
// Leave room for the lag between feeds and consumers.
const COLUMNS = { feeds: 1, consumers: 318, dags: 584, targets: 850 };
const WIDTH = COLUMNS.targets + BOX.width + 1;
const LONGEST = 31;

const colour = (name) => `var(--chakra-colors-${name})`;
const cut = (text, most = LONGEST) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

const FEEDS = {
  commit: ({ branch_id: id, branch }) => `commit queue, branch ${id ?? branch}`,
  tube: ({ tube }) => `tube ${tube}`,
  queue: ({ queue }) => `queue ${queue}`,
  event: () => "event log",
  topology: () => "topology",
};

const feedOf = ({ kind, feed, connection, source }) => ({
  name: (FEEDS[kind] ?? (() => kind))(feed),
  place: source ?? connection,
});

// The targets of a consumer: the targets that its tasks name, or else the database of its results.
const targetsOf = ({ targets, connection }) =>
  targets.length ? targets.map((name) => ({ name, place: "written by its task" })) : [{ name: connection, place: "database of the results" }];

const idOf = (box) => JSON.stringify(box);

// Places the boxes of a column, each as near as possible to the middle of the boxes to which it is joined.
const placed = (boxes, near) => {
  const size = BOX.height + BOX.down;
  const wanted = [...boxes.entries()]
    .map(([id, box]) => {
      const rows = near(id);
      return { id, box, at: rows.reduce((sum, row) => sum + row, 0) / rows.length };
    })
    .sort((one, other) => one.at - other.at);
  let free = 0;
  return new Map(
    wanted.map(({ id, box, at }) => {
      const y = Math.max(free, at);
      free = y + size;
      return [id, { box, y }];
    }),
  );
};

const joined = (edges, end, other, at) => (id) => edges.filter((edge) => edge[end] === id).map((edge) => at(edge[other]));

// The place of each box, and the lines between them.
const layout = (consumers) => {
  const size = BOX.height + BOX.down;
  const feeds = new Map();
  const dags = new Map();
  const targets = new Map();
  const edges = { feeds: [], dags: [], targets: [] };
  const ordered = consumers
    .map((consumer) => ({ consumer, feed: feedOf(consumer) }))
    .sort((one, other) => idOf(one.feed).localeCompare(idOf(other.feed)) || by("")(one.consumer, other.consumer));
  const rows = new Map(ordered.map(({ consumer }, row) => [key(consumer), { box: consumer, y: row * size }]));
  ordered.forEach(({ consumer, feed }) => {
    const id = key(consumer);
    feeds.set(idOf(feed), feed);
    edges.feeds.push({ from: idOf(feed), to: id, consumer });
    // Without a DAG the line goes to the results.
    const workers = consumer.dags.length ? consumer.dags : [null];
    workers.forEach((dag) => {
      if (dag !== null) {
        dags.set(dag, dag);
        edges.dags.push({ from: id, to: dag });
      }
      targetsOf(consumer).forEach((target) => {
        targets.set(idOf(target), target);
        const edge = { from: dag ?? id, to: idOf(target), of: dag === null ? "consumers" : "dags" };
        if (!edges.targets.some((one) => one.from === edge.from && one.to === edge.to)) edges.targets.push(edge);
      });
    });
  });
  const atConsumerRow = (id) => rows.get(id).y;
  const columns = { consumers: rows, feeds: placed(feeds, joined(edges.feeds, "from", "to", atConsumerRow)) };
  columns.dags = placed(dags, joined(edges.dags, "to", "from", atConsumerRow));
  const atWorker = (id) => (columns.dags.get(id) ?? rows.get(id)).y;
  columns.targets = placed(targets, joined(edges.targets, "to", "from", atWorker));
  const height = Math.max(...Object.values(columns).flatMap((column) => [...column.values()].map(({ y }) => y))) + size;
  return { columns, edges, height };
};

// The lag of a consumer, as a short text on its line.
const lag = (consumer) => {
  if (consumer.ready === null || (consumer.ready === 0 && !consumer.waiting)) return null;
  if (consumer.ready === 0) return `${consumer.waiting.toLocaleString()} wait`;
  return [about(consumer.ready, consumer.ready_exact), span(consumer.oldest_seconds)].filter(Boolean).join(", ");
};

const sentence = (consumer, paused) => {
  const { name, place } = feedOf(consumer);
  const behind = lag(consumer);
  const dags = consumer.dags.map((dag) => (paused.includes(dag) ? `${dag}, which is paused` : dag)).join(" and ");
  return [
    `${consumer.consumer}, ${consumer.state}: ${behind === null ? "nothing is ready" : `behind by ${behind}`}.`,
    `From ${name} in ${place}${dags ? ` by DAG ${dags}` : ""} to ${targetsOf(consumer).map((target) => target.name).join(" and ")}.`,
  ].join(" ");
};

const Line = ({ from, to, left, right, tone = "border-emphasized" }) => {
  const [above, below] = [from + BOX.height / 2, to + BOX.height / 2];
  const [start, middle] = [left + BOX.width, (left + BOX.width + right) / 2];
  return h("path", {
    d: `M${start} ${above}C${middle} ${above} ${middle} ${below} ${right} ${below}`,
    fill: "none",
    stroke: colour(tone),
    strokeWidth: 1.5,
  });
};

const Shape = ({ x, y, palette, name, told }) =>
  h(
    "g",
    { transform: `translate(${x} ${y})` },
    h("title", null, `${name}: ${told}`),
    h("rect", { width: BOX.width, height: BOX.height, rx: 6, fill: colour(`${palette}-subtle`), stroke: colour(`${palette}-muted`) }),
    h("text", { x: 9, y: 15, fill: colour("fg"), style: { fontWeight: 500 } }, cut(name)),
    h("text", { x: 9, y: 29, fill: colour("fg-muted"), style: { fontSize: "11px" } }, cut(told, LONGEST + 2)),
  );

const Picture = ({ consumers, name }) => {
  const paused = useContext(Paused);
  const { columns, edges, height } = layout(consumers);
  const y = (column, id) => columns[column].get(id).y;
  return h(
    "svg",
    {
      viewBox: `0 0 ${WIDTH} ${height}`,
      width: WIDTH,
      height,
      role: "group",
      "aria-label": name,
      style: { fontSize: "12px", display: "block" },
    },
    h(
      "g",
      { "aria-hidden": true },
      edges.feeds.map(({ from, to }) =>
        h(Line, { key: `${from} ${to}`, from: y("feeds", from), to: y("consumers", to), left: COLUMNS.feeds, right: COLUMNS.consumers }),
      ),
      edges.dags.map(({ from, to }) =>
        h(Line, { key: `${from} ${to}`, from: y("consumers", from), to: y("dags", to), left: COLUMNS.consumers, right: COLUMNS.dags }),
      ),
      edges.targets.map(({ from, to, of }) =>
        h(Line, { key: `${from} ${to}`, from: y(of, from), to: y("targets", to), left: COLUMNS[of], right: COLUMNS.targets }),
      ),
      edges.feeds.map(({ to, consumer }) => h(Lag, { key: to, y: y("consumers", to), consumer })),
      [...columns.feeds].map(([id, { box, y: at }]) =>
        h(Shape, { key: id, x: COLUMNS.feeds, y: at, palette: "gray", name: box.name, told: `in ${box.place}` }),
      ),
      [...columns.targets].map(([id, { box, y: at }]) =>
        h(Shape, { key: id, x: COLUMNS.targets, y: at, palette: "gray", name: box.name, told: box.place }),
      ),
    ),
    [...columns.consumers].map(([id, { box, y: at }]) => {
      const [palette, icon] = LOOKS[box.state];
      return h(
        Link,
        { key: id, to: atConsumer(box), "aria-label": sentence(box, paused) },
        h(Shape, { x: COLUMNS.consumers, y: at, palette, name: box.consumer, told: `${icon} ${box.state}` }),
      );
    }),
    [...columns.dags].map(([dag, { y: at }]) => {
      const stopped = paused.includes(dag);
      return h(
        Link,
        { key: dag, to: atDag(dag), "aria-label": `DAG ${dag}${stopped ? ", paused" : ""}` },
        h(Shape, { x: COLUMNS.dags, y: at, palette: stopped ? "orange" : "blue", name: dag, told: stopped ? "DAG, paused" : "DAG" }),
      );
    }),
  );
};

// Show the lag on the line before the consumer.
const Lag = ({ y, consumer }) => {
  const told = lag(consumer);
  return (
    told !== null &&
    h(
      "text",
      {
        x: COLUMNS.consumers - 6,
        y: y + BOX.height / 2 - 4,
        textAnchor: "end",
        fill: colour("fg"),
        stroke: colour("bg"),
        strokeWidth: 3,
        paintOrder: "stroke",
        style: { fontSize: "11px", fontVariantNumeric: "tabular-nums" },
      },
      cut(told, 18),
    )
  );
};

export const Flow = ({ consumers }) => {
  if (!consumers.length) return null;
  const shown = [...consumers].sort(by("state")).slice(0, MOST);
  const rest = consumers.length - shown.length;
  const title = "How changes flow";
  return h(
    Section,
    { title },
    h(
      Text,
      { color: "fg.muted", fontSize: "sm", mb: 2 },
      "The flow from feeds through consumers and DAGs to their targets. A line to a consumer shows the number of ready changes, and the age of the oldest.",
      rest > 0 && ` ${many(rest, "consumer")} in less urgent states ${rest === 1 ? "is" : "are"} left out.`,
    ),
    h(
      Box,
      { overflow: "auto", maxH: "44rem", borderWidth: "1px", borderRadius: "md", p: 3, tabIndex: 0, role: "region", "aria-label": title },
      h(Picture, { consumers: shown, name: `${title}: ${many(shown.length, "consumer")}` }),
    ),
  );
};
