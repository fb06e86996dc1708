// Watchers of feeds: their last samples, and whether they still run.
import { chakra, h } from "./shell.js";
import { Ago, Empty, Name, Section, State } from "./pieces.js";
import { Cell, Dags, Rows } from "./table.js";
import { asking, count, span } from "./words.js";

const { Box, Table, Text } = chakra;

const COLUMNS = [["State"], ["Feed"], ["Last look", true], ["Last wake-up", true], ["Ready then", true], ["So since", true], ["What is wrong"], ["DAGs"]];

// A watcher records a sample every five seconds.
const LATE = 60;

const age = (watcher) => (Date.now() - Date.parse(watcher.looked_at)) / 1000;

const state = (watcher) => {
  if (!watcher.sees) return "blind";
  return age(watcher) > LATE ? "away" : "looks";
};

const failure = (watcher) => {
  if (!watcher.sees) return watcher.error ?? "It cannot read the feed. Only users who may read the connection see the reason.";
  if (age(watcher) <= LATE) return "";
  return (
    `There was no sample for ${span(age(watcher))}, so it starts no DAG: the triggerer does not run, every DAG on ` +
    "the asset is paused, or no DAG is scheduled on it any more."
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

const URGENCY = ["blind", "away", "looks"];

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
          h(Box, null, "No watcher was active here in the last days. A DAG that is scheduled on a feed's asset starts a watcher:"),
          h(Box, null, "check that such a DAG is not paused, and that the triggerer runs."),
        ),
  );
