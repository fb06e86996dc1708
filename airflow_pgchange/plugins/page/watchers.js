// Watchers of feeds: their last samples, and whether they still run.
import { chakra, h } from "./shell.js";
import { Ago, Empty, Name, Section, State } from "./pieces.js";
import { Cell, Dags, Rows } from "./table.js";
import { asking, count, span } from "./words.js";

const { Box, Table, Text } = chakra;

const HINTS = {
  checked: "When the watcher last queried the feed",
  woke: "When the watcher last reported ready changes to Airflow, which then starts the DAGs",
  ready: "Changes that were ready at the last successful check",
  since: "Since when its checks have succeeded or, if the watcher is failing, have failed",
};

const COLUMNS = [
  ["State"],
  ["Feed"],
  ["Last check", true, null, { hint: HINTS.checked }],
  ["Last wake-up", true, null, { hint: HINTS.woke }],
  ["Ready", true, null, { hint: HINTS.ready }],
  ["In this state since", true, null, { hint: HINTS.since }],
  ["Problem"],
  ["DAGs"],
];

// A watcher records a sample every five seconds.
const LATE = 60;

const age = (watcher) => (Date.now() - Date.parse(watcher.looked_at)) / 1000;

const state = (watcher) => {
  if (!watcher.sees) return "failing";
  return age(watcher) > LATE ? "silent" : "watching";
};

const failure = (watcher) => {
  if (!watcher.sees) return watcher.error ?? "It cannot read the feed. Only users who may read the connection see the reason.";
  if (age(watcher) <= LATE) return "";
  return (
    `It has not checked the feed for ${span(age(watcher))}, so it starts no DAG: the triggerer does not run, every DAG on ` +
    "the asset is paused, or no DAG is scheduled on the asset any more."
  );
};

const Row = ({ watcher }) =>
  h(
    Table.Row,
    null,
    h(Cell, null, h(State, { word: state(watcher) })),
    h(
      Cell,
      { minW: "10rem", maxW: "22rem" },
      h(Name, null, watcher.feed),
      h(
        Text,
        { color: "fg.muted", fontSize: "xs", overflowWrap: "anywhere" },
        `${watcher.kind} in ${watcher.connection}, watched by ${watcher.watched_by}`,
      ),
    ),
    h(Cell, { number: true }, h(Ago, { time: watcher.looked_at })),
    h(Cell, { number: true }, watcher.woke_at ? h(Ago, { time: watcher.woke_at }) : "none yet"),
    h(Cell, { number: true }, count(watcher.ready)),
    h(Cell, { number: true }, h(Ago, { time: watcher.since })),
    h(Cell, { minW: "14rem", maxW: "30rem", overflowWrap: "anywhere" }, failure(watcher)),
    h(Dags, { dags: watcher.dags }),
  );

const URGENCY = ["failing", "silent", "watching"];

const byUrgency = (one, other) =>
  URGENCY.indexOf(state(one)) - URGENCY.indexOf(state(other)) || one.feed.localeCompare(other.feed);

export const Watchers = ({ said }) =>
  h(
    Section,
    { title: "Watchers of feeds" },
    said.watchers.length
      ? h(
          Rows,
          { label: "Watchers", columns: COLUMNS },
          [...said.watchers]
            .sort(byUrgency)
            .map((watcher) => h(Row, { key: [watcher.connection, watcher.feed, watcher.watched_by].join(" "), watcher })),
        )
      : h(
          Empty,
          null,
          asking(said.databases),
          h(Box, null, "No watcher was active here in the last days. Airflow's triggerer runs a watcher for each feed on whose asset a DAG is scheduled."),
          h(Box, null, "Check that there is such a DAG that is not paused, and that the triggerer runs."),
        ),
  );
