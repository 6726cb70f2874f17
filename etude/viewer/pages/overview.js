// The page that opens first, and a run's report: what training changed, its curves (live), samples, failures, configuration.
import { exported, get } from "./api.js";
import { lineChart, stackedBars } from "./charts.js";
import { h, link, number, svg } from "./dom.js";
import { sideBySide } from "./trajectory.js";

export const WORDS = { running: "running", ended: "complete", stopped: "stopped", failed: "failed", killed: "killed", unknown: "", dumps: "rollout dumps" };

const head = (run) => [
  h("h1", null, run.title),
  h("p", { class: "lead" }, h("b", { class: `status ${run.status}` }, WORDS[run.status] ?? run.status),
    run.step ? ` step ${number(run.step)}${run.total ? ` of ${number(run.total)}` : ""}` : "", run.why ? `: ${run.why}` : ""),
];

const list = (facts) => h("dl", { class: "facts" }, Object.entries(facts).map(([name, text]) => h("div", null, h("dt", null, name), h("dd", null, text))));

const state = (run, params) => [
  run.problems.length ? h("section", { class: "problems" }, h("h2", null, "What was wrong"),
    h("ul", null, run.problems.map((text) => h("li", null, text))),
    h("p", null, h("a", { href: link("why", { run: params.run }) }, "Why is it not learning?"))) : null,
  list(run.facts),
];

const draw = (curves) => [...curves.charts.map(lineChart), curves.time ? stackedBars(curves.time) : null].filter(Boolean);

// A number; with a 95 % interval, a proportion.
const isShare = (value) => value && value.low !== undefined;
const shown = (value) => (!value ? "–" : isShare(value) ? `${(100 * value.value).toFixed(1)} %` : number(value.value, 4));
const bounds = (value, when) => (isShare(value) ? ` ${when} ${(100 * value.low).toFixed(1)}–${(100 * value.high).toFixed(1)} %` : "");
const interval = (value, y, kind) => (isShare(value) ? [
  svg("line", { class: kind, x1: `${100 * value.low}%`, x2: `${100 * value.high}%`, y1: y, y2: y }),
  svg("circle", { class: kind, cx: `${100 * value.value}%`, cy: y, r: 5 })] : []);

const headline = ({ name, before, after }) => h("article", { class: "card", "data-headline": name }, h("h3", null, name),
  h("p", null, h("span", { class: "muted" }, shown(before)), " → ", h("b", { class: "big" }, shown(after))),
  isShare(before) || isShare(after) ? [
    svg("svg", { class: "interval", "aria-hidden": "true" }, svg("line", { class: "axis", x1: "0%", x2: "100%", y1: 20, y2: 20 }), interval(before, 12, "before"), interval(after, 28, "after")),
    h("small", null, `95 % intervals:${bounds(before, "before")}${bounds(after, "after")}. The scale runs from 0 to 100 %.`)] : null);

const label = (places, labels, run) => places.map((place, i) => [place, run, labels[i]]);

const opening = async (found, { run }) => [
  found.change ? h("section", { id: "change" }, h("h2", null, "The same question, before and after"),
    h("p", { class: "muted" }, "The first whose reward rose; below are some that were not picked."),
    await sideBySide(label(found.change, ["Before", "After"], run))) : null,
  h("section", { id: "before-after" }, found.headlines.length || found.change ? h("h2", null, "Before and after") : null,
    h("div", { class: "cards" }, found.headlines.map(headline)), list(found.facts)),
];

const closing = async (found, { run }) => [
  found.samples ? h("section", { id: "samples" }, h("h2", null, "Sample trajectories"),
    h("p", { class: "muted" }, `The first of “${found.samples.files[0]}”${found.samples.files[1] ? `, beside “${found.samples.files[1]}”` : ""}, not picked by score. Colour and edge say who wrote what; only the model’s own tokens are trained on.`),
    h("p", null, ["model", "tool", "user", "prompt", "template"].map((name) => h("span", { class: `flag block ${name === "model" ? "sampled" : name}` }, name))),
    await Promise.all(found.samples.pairs.map((pair) => (found.samples.files[1] ? sideBySide(label(pair, ["Before", "After"], run)) : sideBySide(label([pair[0]], ["Sample"], run))))))
    : h("p", { class: "muted" }, "This run kept no trajectories (trainer.rollout_data_dir and trainer.validation_data_dir)."),
  found.failures.length ? h("section", { id: "failures" }, h("h2", null, "Failed examples"),
    h("p", { class: "muted" }, "The first of the last dump that were cut off, had a call that failed, or earned nothing."),
    await sideBySide(label(found.failures, ["Failed", "Failed", "Failed"], run))) : null,
  found.config ? h("section", { id: "configuration" }, h("h2", null, "Configuration"), h("details", { class: "card" }, h("summary", null, "config.yaml"), h("pre", null, found.config),
    found.config_omitted ? h("small", null, `… ${number(found.config_omitted)} more characters`) : null)) : null,
];

export const overview = async ({ params, every }) => {
  const [run, curves] = await Promise.all([get("overview", { run: params.run }), get("curves", { run: params.run })]);
  const title = h("div", null, head(run));
  const charts = h("div", { class: "charts", "data-step": curves.step ?? 0 }, draw(curves));
  const none = curves.logged ? "No metrics yet: the first step has not ended." : "No metrics (trainer.logger needs jsonl).";
  if (!curves.charts.length) charts.append(h("p", { class: "muted" }, none));
  const below = h("div", null, state(run, params));
  const first = h("div"), last = h("div", { id: "results" });
  const fill = async () => {
    const found = await get("results", { run: params.run });
    first.replaceChildren(...(await opening(found, params)).filter(Boolean));
    last.replaceChildren(...(await closing(found, params)).filter(Boolean));
    last.dataset.drawn = "1";
  };
  const filled = fill().catch((error) => first.replaceChildren(h("p", { class: "problem", role: "status" }, error.message)));
  if (exported) await filled;
  let version = curves.version;
  every(async () => {
    const found = await get("curves", { run: params.run, version });
    if (found.version === version) return;
    version = found.version;
    const now = await get("overview", { run: params.run });
    if (charts.matches(":hover")) return (version = ""); // the user is reading values: redraw later
    charts.replaceChildren(...draw(found));
    charts.dataset.step = found.step;
    title.replaceChildren(...head(now));
    below.replaceChildren(...state(now, params).filter(Boolean));
  });
  return [title, first, h("h2", null, "Progress"), charts, below, last];
};
