// Compares two runs: overlaid curves, configuration diff, and shared prompts side by side.
import { get } from "./api.js";
import { lineChart } from "./charts.js";
import { h, link, number, select, table } from "./dom.js";
import { sideBySide } from "./trajectory.js";

const both = (left, right, titles) => {
  const named = new Map(right.map((chart) => [chart.title, chart]));
  return left.filter((chart) => named.has(chart.title)).map((chart) => lineChart({
    ...chart,
    summary: "",
    lines: [...chart.lines.map((line, i) => ({ ...line, label: `${titles[0]}: ${line.label}`, colour: i % 8 })),
      ...named.get(chart.title).lines.map((line, i) => ({ ...line, label: `${titles[1]}: ${line.label}`, colour: i % 8, dashed: true }))],
  }));
};

const siblings = async (params) => {
  const found = await get("trajectory", { run: params.run, place: params.siblings });
  return [h("h1", null, "Rollouts of one prompt"), await sideBySide(found.siblings.slice(0, 8).map((row) => [row.place, params.run]), false)];
};

const prompts = (found, params) => (found.prompts.length ? table(
  [h("th", null, "prompt"), h("th", { class: "n" }, found.titles[0]), h("th", { class: "n" }, found.titles[1])],
  found.prompts.map((pair) => h("tr", null,
    h("td", null, h("a", { href: link("compare", { run: params.run, other: params.other, left: pair.left.place, right: pair.right.place }) }, pair.prompt || "…")),
    h("td", { class: "n", title: `step ${pair.left.step}, ${pair.left.size} rollouts` }, number(pair.left.mean)),
    h("td", { class: "n", title: `step ${pair.right.step}, ${pair.right.size} rollouts` }, number(pair.right.mean)))), { id: "shared" })
  : h("p", { class: "muted" }, "No prompt was rolled out by both."));

export const compare = async ({ params, go }) => {
  if (params.siblings) return siblings(params);
  if (params.left) return [h("h1", null, "The same prompt in two runs"), await sideBySide([[params.left, params.run], [params.right, params.other]])];
  const { runs } = await get("runs");
  const mine = params.run ?? runs[0].name;
  const others = runs.filter((run) => run.name !== mine);
  if (!others.length) return [h("h1", null, "Compare"), h("p", { class: "muted" }, "There is one run here: start  etude view  on a folder that holds several.")];
  const other = others.find((run) => run.name === params.other)?.name ?? others[0].name;
  const [found, left, right] = await Promise.all([get("compare", { run: mine, other }), get("curves", { run: mine }), get("curves", { run: other })]);
  return [
    h("h1", null, `${found.titles[0]} and ${found.titles[1]}`),
    select("other run", others.map((run) => [run.name, run.title]), other, (name) => go("compare", { other: name })),
    found.branches.map((text) => h("p", { class: "muted" }, `${text}.`)),
    h("h2", null, "Configuration"),
    found.differences.length ? table([h("th", null, "key"), h("th", null, found.titles[0]), h("th", null, found.titles[1])],
      found.differences.map((each) => h("tr", null, h("td", null, each.key), h("td", null, each.left), h("td", null, each.right))), { id: "differences" })
      : h("p", { class: "muted" }, found.reason || "They do not differ."),
    found.omitted ? h("p", { class: "muted" }, `… ${number(found.omitted)} more keys`) : null,
    h("h2", null, "The same prompts"), h("p", { class: "muted" }, `${number(found.shared)} in both, with the mean score in the last step that has them (of validation, where there is one); the largest differences first.`),
    prompts(found, { ...params, run: mine, other }),
    h("h2", null, "Curves"), h("p", { class: "muted" }, `${found.titles[1]} is dashed.`),
    h("div", { class: "charts" }, both(left.charts, right.charts, found.titles)),
  ].filter(Boolean);
};
