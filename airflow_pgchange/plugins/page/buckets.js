// The owners of a tier's buckets, as a bar in plain SVG with the shell's colours, and as text.
import { chakra, h } from "./shell.js";

const { Box, Text } = chakra;

const WIDTH = 1000;
const HEIGHT = 56;
const BAR = 34;
const PALETTE = ["blue", "orange", "teal", "purple", "pink", "green", "red", "cyan"];
// The width of a letter.
const WIDE = 8;
const SPOKEN = 20;

const token = (palette, name) => `var(--chakra-colors-${palette}-${name})`;

export const number = (text) => BigInt(text).toLocaleString();

export const size = ({ first, last }) => BigInt(last) - BigInt(first) + 1n;

// The ranges of a tier, and the gaps between them, which have no owner.
export const withGaps = (ranges) =>
  ranges.flatMap((range, place) => {
    const before = place > 0 ? BigInt(ranges[place - 1].last) + 1n : BigInt(range.first);
    const gap = { tier: range.tier, first: String(before), last: String(BigInt(range.first) - 1n), state: "no owner", replicaset: null, other: null };
    return before < BigInt(range.first) ? [gap, range] : [range];
  });

export const whose = ({ replicaset, other, state }) => {
  if (replicaset === null) return "no owner";
  if (other === null) return replicaset;
  return state === "copied" ? `${replicaset}, from ${other}` : `${replicaset}, ${state === "copying" ? "going to" : "no longer going to"} ${other}`;
};

const spoken = (ranges) => {
  const told = ranges.slice(0, SPOKEN).map((range) => `${number(range.first)} to ${number(range.last)}: ${whose(range)}`);
  const rest = ranges.length > SPOKEN ? `; and ${ranges.length - SPOKEN} more ranges` : "";
  return told.join("; ") + rest;
};

const Segment = ({ range, from, to, colours }) => {
  const mine = colours.get(range.replicaset);
  const width = Math.max(1, to - from);
  return h(
    "g",
    null,
    h("title", null, `${number(range.first)} to ${number(range.last)}: ${whose(range)}`),
    h("rect", {
      x: from,
      y: 0,
      width,
      height: BAR,
      fill: mine ? token(mine, "solid") : "transparent",
      stroke: mine ? "var(--chakra-colors-bg)" : "var(--chakra-colors-fg-muted)",
      strokeDasharray: mine ? undefined : "4 4",
    }),
    // A bucket that moves also has the colour of its other replicaset.
    range.other &&
      h("rect", { x: from, y: BAR - 8, width, height: 8, fill: token(colours.get(range.other) ?? "gray", "solid"), stroke: "var(--chakra-colors-bg)" }),
    range.replicaset && range.replicaset.length * WIDE < width && h("text", { x: from + 6, y: 20, fill: token(mine, "contrast") }, range.replicaset),
  );
};

const Swatch = ({ colour }) =>
  h(Box, { as: "span", "aria-hidden": true, w: "14px", h: "14px", borderRadius: "sm", flexShrink: 0, style: { background: token(colour, "solid") } });

// ranges: the ranges and gaps of one tier; owners: [{name, told}], where told is the text of the legend.
export const Buckets = ({ tier, ranges, owners }) => {
  const colours = new Map(owners.map(({ name }, place) => [name, PALETTE[place % PALETTE.length]]));
  const [first, last] = [BigInt(ranges[0].first), BigInt(ranges.at(-1).last)];
  const place = (bucket) => Number(((BigInt(bucket) - first) * 1_000_000n) / (last - first + 1n)) * (WIDTH / 1_000_000);
  return h(
    Box,
    { as: "figure", borderWidth: "1px", borderRadius: "md", p: 3, mb: 3 },
    h(
      Box,
      { as: "figcaption", display: "flex", flexWrap: "wrap", columnGap: 6, mb: 2, fontSize: "sm" },
      h(Text, { fontWeight: "medium" }, `Buckets of tier ${tier}`),
      owners.map(({ name, told }) =>
        h(Box, { key: name, display: "flex", gap: 2, alignItems: "center" }, h(Swatch, { colour: colours.get(name) }), `${name}: ${told}`),
      ),
    ),
    h(
      "svg",
      {
        viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
        role: "img",
        "aria-label": `Owners of the buckets of tier ${tier}. ${spoken(ranges)}.`,
        style: { width: "100%", height: "auto", fontSize: "12px", display: "block" },
      },
      ranges.map((range) =>
        h(Segment, { key: range.first, range, from: place(range.first), to: place(BigInt(range.last) + 1n), colours }),
      ),
      h("text", { x: 0, y: HEIGHT - 4, fill: "var(--chakra-colors-fg-muted)" }, number(first)),
      h("text", { x: WIDTH, y: HEIGHT - 4, textAnchor: "end", fill: "var(--chakra-colors-fg-muted)" }, number(last)),
    ),
  );
};
