// Charts over time, and a small chart for a row of a table, in plain SVG with the shell's colours.
import { Fragment, chakra, h, useState } from "./shell.js";
import { UNKNOWN } from "./words.js";

const { Box, Text } = chakra;

const colour = (name) => `var(--chakra-colors-${name})`;

const WIDTH = 1000;
const HEIGHT = 150;
const EDGE = { left: 80, right: 16, top: 12, bottom: 26 };
const HOUR = 3600_000;
// After this time without a sample, the page was not open.
const GAP = 30_000;

// Returns a round number that is at least the highest value. Its half is round, too, for the middle line.
export const aboveNumber = (highest) => {
  const size = 10 ** Math.floor(Math.log10(Math.max(highest, 2)));
  return Math.max(2, [1, 2, 4, 6, 8, 10].find((times) => times * size >= highest) * size);
};

const SPANS = [10, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400];

export const aboveSpan = (highest) =>
  SPANS.find((span) => span >= highest) ?? aboveNumber(highest / 86400) * 86400;

const x = (at, now) => EDGE.left + (1 - (now - at) / HOUR) * (WIDTH - EDGE.left - EDGE.right);
const y = (value, top) => HEIGHT - EDGE.bottom - (value / top) * (HEIGHT - EDGE.top - EDGE.bottom);

// A line with a gap wherever there is no value or no sample.
const path = (samples, value, place) => {
  let before = null;
  return samples
    .map((sample) => {
      if (value(sample) === null) {
        before = null;
        return "";
      }
      const pen = before !== null && sample.time - before <= GAP ? "L" : "M";
      before = sample.time;
      const [left, down] = place(sample);
      // A sample between two gaps is a dot.
      return `${pen}${left.toFixed(1)} ${down.toFixed(1)}${pen === "M" ? "h0.1" : ""}`;
    })
    .join("");
};

const Axes = ({ top, told, now }) =>
  h(
    Fragment,
    null,
    [0, 0.5, 1].map((part) =>
      h(
        "g",
        { key: part },
        h("line", {
          x1: EDGE.left,
          x2: WIDTH - EDGE.right,
          y1: y(part, 1),
          y2: y(part, 1),
          stroke: colour("border"),
        }),
        h("text", { x: EDGE.left - 8, y: y(part, 1) + 4, textAnchor: "end", fill: colour("fg-muted") }, told(part * top)),
      ),
    ),
    [60, 45, 30, 15, 0].map((minutes) =>
      h(
        "text",
        {
          key: minutes,
          x: x(now - minutes * 60_000, now),
          y: HEIGHT - 6,
          textAnchor: minutes === 0 ? "end" : "middle",
          fill: colour("fg-muted"),
        },
        minutes === 0 ? "now" : `${minutes} min ago`,
      ),
    ),
  );

const sentence = (samples, { name, value }, told) => {
  const known = samples.map(value).filter((one) => one !== null);
  if (!known.length) return `${name}: not known.`;
  return `${name}: ${told(known.at(-1))} now, at least ${told(Math.min(...known))}, at most ${told(Math.max(...known))}.`;
};

// series: [{name, colour, value(sample)}]; samples have a time; told(number) is the text of a value, above(number) a round number
// above it.
export const Plot = ({ title, samples, series, told, above }) => {
  const [chosen, choose] = useState(null);
  const now = Math.max(Date.now(), samples.at(-1)?.time ?? 0);
  const top = above(Math.max(0, ...samples.flatMap((sample) => series.map(({ value }) => value(sample) ?? 0))));
  const point = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    const far = (sample) => Math.abs(x(sample.time, now) - at);
    choose(samples.reduce((best, sample) => (best === null || far(sample) < far(best) ? sample : best), null));
  };
  const shown = chosen ?? samples.at(-1);
  return h(
    Box,
    { as: "figure", borderWidth: "1px", borderRadius: "md", p: 3, mb: 3 },
    h(
      Box,
      { as: "figcaption", display: "flex", flexWrap: "wrap", columnGap: 6, mb: 2, fontSize: "sm" },
      h(Text, { fontWeight: "medium" }, title),
      series.map(({ name, colour: tone, value }) =>
        h(
          Box,
          { key: name, display: "flex", gap: 2, alignItems: "center", fontVariantNumeric: "tabular-nums" },
          h(Box, { as: "span", "aria-hidden": true, w: "14px", h: "3px", style: { background: colour(tone) } }),
          `${name}: ${shown === undefined || value(shown) === null ? UNKNOWN : told(value(shown))}`,
        ),
      ),
      h(
        Text,
        { color: "fg.muted", ml: "auto" },
        chosen ? new Date(chosen.time).toLocaleTimeString() : "now; point at the lines for another time",
      ),
    ),
    h(
      "svg",
      {
        viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
        role: "img",
        "aria-label": [`${title} in the last hour.`, ...series.map((one) => sentence(samples, one, told))].join(" "),
        style: { width: "100%", height: "auto", fontSize: "12px", display: "block" },
        onPointerMove: point,
        onPointerLeave: () => choose(null),
      },
      h(Axes, { top, told, now }),
      series.map(({ name, colour: tone, value }) =>
        h("path", {
          key: name,
          d: path(samples, value, (sample) => [x(sample.time, now), y(value(sample), top)]),
          fill: "none",
          stroke: colour(tone),
          strokeWidth: 2,
          strokeLinejoin: "round",
          strokeLinecap: "round",
        }),
      ),
      chosen &&
        h("line", {
          x1: x(chosen.time, now),
          x2: x(chosen.time, now),
          y1: EDGE.top,
          y2: HEIGHT - EDGE.bottom,
          stroke: colour("fg-muted"),
          strokeDasharray: "3 3",
        }),
    ),
  );
};

// The number of ready changes, a point every two minutes.
export const Spark = ({ name, values }) => {
  const known = values.filter((value) => value !== null);
  if (!known.length) return null;
  const top = Math.max(1, ...known);
  const samples = values.map((value, place) => ({ time: place, value }));
  return h(
    "svg",
    {
      viewBox: "0 0 76 24",
      width: 76,
      height: 24,
      role: "img",
      "aria-label": `Ready for ${name} in the last hour: at most ${Math.max(...known).toLocaleString()}`,
      style: { display: "inline-block", verticalAlign: "middle" },
    },
    h("line", { x1: 1, x2: 75, y1: 22, y2: 22, stroke: colour("border") }),
    h("path", {
      d: path(samples, (sample) => sample.value, (sample) => [
        2 + (sample.time / (values.length - 1)) * 72,
        22 - (sample.value / top) * 20,
      ]),
      fill: "none",
      stroke: colour("blue-fg"),
      strokeWidth: 1.5,
      strokeLinejoin: "round",
      strokeLinecap: "round",
    }),
  );
};
