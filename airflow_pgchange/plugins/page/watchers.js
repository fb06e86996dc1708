// What watchers of feeds see, and whether they look at all.
import { chakra, h } from "./shell.js";
import { Ago, Empty, Name, Section, State } from "./pieces.js";
import { Cell, Dags, Rows } from "./table.js";
import { asking, count, span } from "./words.js";

const { Box, Table, Text } = chakra;

const COLUMNS = [["State"], ["Feed"], ["Last look", true], ["Last wake-up", true], ["Ready then", true], ["So since", true], ["What is wrong"], ["DAGs"]];

// A watcher notes what it sees every five seconds.
const LATE = 60;

const age = (watcher) => (Date.now() - Date.parse(watcher.looked_at)) / 1000;

const state = (watcher) => {
  if (!watcher.sees) return "blind";
  return age(watcher) > LATE ? "away" : "looks";
};

const trouble = (watcher) => {
  if (!watcher.sees) return watcher.error ?? "It cannot look: who may read the connection sees why.";
  if (age(watcher) <= LATE) return "";
  return (
    `Nobody has looked for ${span(age(watcher))}, so no DAG is woken by it: the triggerer does not run, every DAG on ` +
    "the asset is paused, or none is scheduled on it any more."
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
    h(Cell, { minW: "14rem", maxW: "30rem", overflowWrap: "anywhere" }, trouble(watcher)),
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
          h(Box, null, "No watcher has looked here in the last days. A DAG that is scheduled on a feed's asset brings one:"),
          h(Box, null, "see that such a DAG is not paused, and that the triggerer runs."),
        ),
  );
