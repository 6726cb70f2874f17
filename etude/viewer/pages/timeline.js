// Timeline of a step: one lane per trajectory, then one per trainer activity.
import { get } from "./api.js";
import { h, link, number, seconds, select, svg } from "./dom.js";

const COLOURS = { queue: 7, generate_sequences: 0, tool_calls: 1, interaction: 3, compute_score: 2 };
const NAMES = { queue: "waited", generate_sequences: "generation", tool_calls: "tools", interaction: "user", compute_score: "reward" };
const ORDER = ["gen", "reward", "old_log_prob", "ref", "teacher", "values", "adv", "update_critic", "update_actor", "update_weights", "testing"];

const lane = (spans, whole, label) => svg("svg", { viewBox: "0 0 1000 12", preserveAspectRatio: "none", role: "img", "aria-label": label },
  spans.map(([name, start, length]) => svg("rect", { class: `bar c${COLOURS[name] ?? 4}`, x: (1000 * start) / whole, width: Math.max(1, (1000 * length) / whole), y: 1, height: 10 },
    svg("title", null, `${NAMES[name] ?? name}: ${seconds(length)} from ${seconds(start)}`))));

const training = (times) => {
  const names = Object.keys(times).filter((name) => name !== "step");
  names.sort((a, b) => (ORDER.indexOf(a) + 99) % 99 - (ORDER.indexOf(b) + 99) % 99);
  let at = 0;
  const placed = names.map((name) => { const start = at; at += times[name]; return [name, start, times[name]]; });
  const whole = Math.max(at, times.step ?? 0) || 1;
  return placed.map(([name, start, length], i) => h("div", { class: "lane" }, h("span", { class: "who" }, `${name} ${seconds(length)}`),
    svg("svg", { viewBox: "0 0 1000 12", preserveAspectRatio: "none", role: "img", "aria-label": `${name} ${seconds(length)}` },
      svg("rect", { class: `bar c${i % 8}`, x: (1000 * start) / whole, width: Math.max(1, (1000 * length) / whole), y: 1, height: 10 }))));
};

export const timeline = async ({ params, go, follow }) => {
  if (!params.step) await follow();
  const found = await get("timeline", { run: params.run, step: params.step });
  const whole = Math.max(...found.lanes.flatMap((each) => each.spans.map(([, start, length]) => start + length)), 1e-9);
  const used = [...new Set(found.lanes.flatMap((each) => each.spans.map(([name]) => name)))];
  const known = found.lanes.every((each) => each.known);
  return [
    h("h1", null, "Timeline"),
    found.steps.length ? select("step", found.steps.map((step) => [step, step]).reverse(), found.step, (step) => go("timeline", { step })) : null,
    h("h2", null, `Trajectories of step ${found.step}`),
    h("p", { class: "muted" }, found.lanes.length ? `${number(found.lanes.length)} trajectories in ${seconds(whole)}` : "This step has no dump.",
      found.omitted ? `; ${number(found.omitted)} more are left out` : "",
      known ? "" : "; this dump says how long each activity took, not when: sums stand one after another"),
    h("ul", { class: "legend" }, used.map((name) => h("li", null, h("i", { class: `c${COLOURS[name] ?? 4}` }), NAMES[name] ?? name))),
    h("div", { class: "lanes" }, found.lanes.map((each) => h("a", { class: "lane", href: link("trajectory", { run: params.run, place: each.place }), title: `${each.uid}, score ${number(each.score)}` },
      h("span", { class: "who" }, each.question || each.uid), lane(each.spans, whole, `${each.uid}`)))),
    h("h2", null, "The trainer"),
    Object.keys(found.training).length ? h("div", { class: "lanes" }, training(found.training)) : h("p", { class: "muted" }, "No timings of this step in metrics.jsonl."),
  ].filter(Boolean);
};
