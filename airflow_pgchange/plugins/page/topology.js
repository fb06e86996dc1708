// The topology: the instances of a cluster, their masters, and the owners of buckets.
import { Fragment, chakra, h } from "./shell.js";
import { topology as ask } from "./api.js";
import { Buckets, number, size, whose, withGaps } from "./buckets.js";
import { eachDatabase } from "./each.js";
import { Ago, Call, Empty, Fact, Guide, Name, Section, State } from "./pieces.js";
import { Cell, Rows } from "./table.js";
import { count, many } from "./words.js";

const { Box, Table, Text } = chakra;

const INSTANCES = [["State"], ["Instance"], ["Replicaset"], ["Role"], ["Address"], ["Buckets", true]];
const RANGES = [["State"], ["First", true], ["Last", true], ["Buckets", true], ["Owner"], ["Master"]];
const PORTION = 100;

const total = (ranges) => ranges.reduce((sum, range) => sum + size(range), 0n);

const byTier = (ranges) => {
  const tiers = new Map(ranges.map(({ tier }) => [tier, []]));
  ranges.forEach((range) => tiers.get(range.tier).push(range));
  return [...tiers.values()].map(withGaps);
};

// The objects of a cluster by their names, and the number of buckets of each owner.
const known = (found) => {
  const buckets = new Map();
  found.ranges.forEach((range) => buckets.set(range.replicaset, (buckets.get(range.replicaset) ?? 0n) + size(range)));
  return {
    instances: new Map(found.instances.map((one) => [one.name, one])),
    replicasets: new Map(found.replicasets.map((one) => [one.name, one])),
    buckets,
  };
};

const part = (instance, replicaset) => {
  if (replicaset?.master === instance.name) return replicaset.chosen ? "master, to be replaced" : "master";
  if (replicaset?.chosen === instance.name) return "chosen as master";
  return "standby";
};

const masterTrouble = ({ name, master, chosen }, instances) => {
  if (master === null) return `Replicaset ${name} has no master: record it with topology.set_master().`;
  const state = instances.get(master)?.state;
  if (chosen) return `${chosen} was chosen as master of replicaset ${name} instead of ${master}, but the catalogue does not record the change yet.`;
  if (state !== "Online") return `${master}, the master of replicaset ${name}, is ${state ?? "not in the catalogue"}.`;
  return null;
};

const gapTrouble = (ranges) => {
  const gaps = ranges.filter((range) => range.replicaset === null);
  if (!gaps.length) return null;
  const [{ tier, first, last }] = gaps;
  return (
    `${number(total(gaps))} buckets of tier ${tier} have no owner, the first of them ${number(first)} to ${number(last)}. ` +
    "Assign them to a replicaset with topology.assign_buckets()."
  );
};

const troubles = (found, { instances }, tiers) =>
  [...found.replicasets.map((one) => masterTrouble(one, instances)), ...tiers.map(gapTrouble)].filter((told) => told !== null);

const Instance = ({ instance, replicaset, buckets }) =>
  h(
    Table.Row,
    null,
    h(Cell, null, h(State, { word: instance.state })),
    h(Cell, { minW: "8rem", maxW: "18rem" }, h(Name, null, instance.name)),
    h(Cell, { maxW: "18rem", overflowWrap: "anywhere" }, instance.replicaset, h(Text, { color: "fg.muted", fontSize: "xs" }, `tier ${instance.tier}`)),
    h(Cell, null, part(instance, replicaset)),
    h(Cell, { maxW: "18rem", overflowWrap: "anywhere" }, instance.address),
    h(Cell, { number: true }, number(buckets ?? 0n)),
  );

const Range = ({ range, replicaset }) =>
  h(
    Table.Row,
    null,
    h(Cell, null, range.state),
    h(Cell, { number: true }, number(range.first)),
    h(Cell, { number: true }, number(range.last)),
    h(Cell, { number: true }, number(size(range))),
    h(Cell, { maxW: "18rem", overflowWrap: "anywhere" }, whose(range)),
    h(Cell, { maxW: "18rem", overflowWrap: "anywhere" }, replicaset?.master ?? "none"),
  );

const Tier = ({ tier, ranges, connection, things }) => {
  const owners = [...new Set(ranges.flatMap(({ replicaset, other }) => [replicaset, other]).filter((name) => name !== null))].sort();
  const told = (name) => `master ${things.replicasets.get(name)?.master ?? "none"}, ${number(things.buckets.get(name) ?? 0n)} buckets`;
  const label = `Buckets of tier ${tier} in ${connection}`;
  const cut = ranges.length > PORTION ? `: the first ${PORTION} of ${count(ranges.length)} ranges` : "";
  return h(
    Section,
    { title: label + cut },
    h(Buckets, { tier, ranges, owners: owners.map((name) => ({ name, told: told(name) })) }),
    h(
      Rows,
      { label, columns: RANGES },
      ranges.slice(0, PORTION).map((range) => h(Range, { key: range.first, range, replicaset: things.replicasets.get(range.replicaset) })),
    ),
  );
};

const Standing = ({ found }) => {
  const online = found.instances.filter((one) => one.state === "Online").length;
  return h(
    Box,
    { as: "dl", display: "flex", flexWrap: "wrap", columnGap: 10, rowGap: 3, mb: 3 },
    h(Fact, { name: "Replicasets" }, count(found.replicasets.length)),
    h(Fact, { name: "Instances online" }, `${count(online)} of ${count(found.instances.length)}`),
    h(Fact, { name: "Buckets" }, number(total(found.ranges))),
    h(Fact, { name: "Moving buckets" }, number(total(found.ranges.filter((range) => range.state !== "active")))),
    h(Fact, { name: "Last change" }, found.log.changed_at === null ? "never" : h(Ago, { time: found.log.changed_at })),
    h(Fact, { name: "Log position", hint: "Term and index of the latest entry of the catalogue's log" }, `term ${count(found.log.term)}, index ${count(found.log.index)}`),
  );
};

const Nothing = ({ found, connection }) => {
  if (found.installed === null) return h(Empty, null, `Waiting for the first answer of ${connection}.`);
  const [told, calls] = found.installed
    ? ["No cluster is described in this catalogue. It begins with a replicaset, an instance and its master:", "select topology.add_replicaset('r1');\nselect topology.add_instance('i1', 'r1', '10.0.0.1:5432');\nselect topology.set_master('r1', 'i1');"]
    : ["There is no catalogue of a cluster in this database. Install the schemas to create it:", `airflow-pgchange install --postgres-conn-id ${connection}`];
  return h(Empty, null, h(Text, { mb: 2 }, told), h(Call, null, calls), h(Guide, { name: "how-to/topology" }, "The guide to the topology"));
};

const Topology = ({ found, title, database: { connection } }) => {
  if (!found.replicasets.length) return h(Section, { title }, h(Nothing, { found, connection }));
  const things = known(found);
  const tiers = byTier(found.ranges);
  const label = `Instances in ${connection}`;
  return h(
    Fragment,
    null,
    h(
      Section,
      { title: found.cut ? `${title}: only a part is shown` : title },
      h(Standing, { found }),
      troubles(found, things, tiers).map((told) => h(Text, { key: told, color: "orange.fg", fontSize: "sm", mb: 3 }, told)),
      h(
        Rows,
        { label, columns: INSTANCES },
        found.instances.map((instance) =>
          h(Instance, {
            key: instance.name,
            instance,
            replicaset: things.replicasets.get(instance.replicaset),
            buckets: things.buckets.get(instance.replicaset),
          }),
        ),
      ),
    ),
    tiers.map((ranges) => h(Tier, { key: ranges[0].tier, tier: ranges[0].tier, ranges, connection, things })),
  );
};

export const AllTopologies = eachDatabase({ ask, title: "Topology", Shown: Topology, isEmpty: ({ replicasets }) => !replicasets.length });
