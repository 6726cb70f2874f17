// Why is it not learning? What removed the learning signal from a step, with example trajectories.
import { get } from "./api.js";
import { lineChart } from "./charts.js";
import { h, link, lists, number, percent, select, table } from "./dom.js";

const examples = (each, params) => (each.examples.length ? h("p", null, "look at ", each.examples.map(({ name, place, question }, i) => [
  i ? " · " : "", place ? h("a", { href: link("trajectory", { run: params.run, place }), title: name }, question || name) : name])) : null);

const cause = (each, params) => h("article", { class: "card", "data-cause": each.what },
  h("p", { class: "big" }, percent(each.share)), h("h3", null, each.what), h("p", { class: "muted" }, each.text),
  h("progress", { max: 1, value: each.share, "aria-label": each.what }),
  each.fix ? h("p", { class: "fix" }, "→ ", each.fix) : null,
  examples(each, params));

const spread = (groups, params) => {
  if (!groups.length) return null;
  const flat = groups.filter((group) => group.std === 0).length;
  return h("section", null, h("h2", null, "Spread of each group's rewards"),
    h("p", { class: "muted" }, `${flat} of ${groups.length} groups have none. A square is a group; the stronger, the more its rewards differ.`),
    h("div", { class: "squares" }, groups.map((group) => h("a", {
      class: `v${Math.round(10 * Math.min(1, group.std / (groups.at(-1).std || 1)))}`,
      href: link("trajectories", { run: params.run, q: "", step: params.step, group: 1, uid: group.uid }),
      title: `${group.uid}: mean ${number(group.mean)}, standard deviation ${number(group.std)}`,
      "aria-label": `group ${group.uid}, standard deviation ${number(group.std)}`,
    }, group.std === 0 ? "0" : ""))));
};

// A run that rose says so first, then what takes most from its step.
const verdict = ({ rose, trend, text }, step) => [h("p", { class: "big" }, rose ? trend : text), h("p", null, rose ? `step ${step}: ${text}` : trend)];

export const why = async ({ params, go, follow }) => {
  if (!params.step) await follow();
  const found = await get("why", { run: params.run, step: params.step });
  const shares = found.components.some((part) => lists(part.spread));
  const withStep = { ...params, step: String(found.step) };
  return [
    h("h1", null, "Why is it not learning?"),
    h("section", { class: "card verdict" }, verdict(found.verdict, found.step),
      found.verdict.fix ? h("p", { class: "fix" }, "→ ", found.verdict.fix) : null, examples(found.verdict, params)),
    found.steps.length ? select("step", found.steps.map((step) => [step, step]).reverse(), found.step, (step) => go("why", { step })) : h("p", null, `step ${found.step}`),
    found.problems.length ? h("ul", { class: "problems" }, found.problems.map((text) => h("li", null, text))) : null,
    found.causes.length ? h("div", { class: "cards" }, found.causes.map((each) => cause(each, params)))
      : h("p", { class: "muted" }, "This step has no dump (trainer.rollout_data_dir), so there is nothing to count."),
    spread(found.spread, withStep),
    h("div", { class: "cards" },
      found.components.length ? h("section", { class: "card" }, h("h3", null, "Reward by source"),
        table([h("th", null, "source"), h("th", { class: "n" }, "mean"), shares ? h("th", { class: "n", title: "its part of the variance of the total" }, "of the spread") : null],
          found.components.map((part) => h("tr", null, h("td", null, part.name), h("td", { class: "n" }, lists(part.mean) ? number(part.mean) : ""),
            shares ? h("td", { class: "n" }, lists(part.spread) ? percent(part.spread) : "") : null)))) : null,
      Object.keys(found.mismatch).length ? h("details", { class: "card" }, h("summary", null, "Sampler–trainer mismatch"),
        table([h("th", null, "metric"), h("th", { class: "n" }, "value")],
          Object.entries(found.mismatch).map(([name, value]) => h("tr", null, h("td", null, name.replace("rollout_corr/", "")), h("td", { class: "n" }, number(value)))))) : null),
    h("div", { class: "charts" }, found.charts.map(lineChart)),
  ].filter(Boolean);
};
