// Status of the run, and its curves, updated live.
import { get } from "./api.js";
import { lineChart, stackedBars } from "./charts.js";
import { h, link, number } from "./dom.js";

const WORDS = { running: "running", ended: "complete", failed: "stopped", killed: "killed", unknown: "", dumps: "rollout dumps" };

const head = (run) => [
  h("h1", null, run.title),
  h("p", { class: "lead" }, h("b", { class: `status ${run.status}` }, WORDS[run.status] ?? run.status),
    run.step ? ` step ${number(run.step)}${run.total ? ` of ${number(run.total)}` : ""}` : "", run.why ? `: ${run.why}` : ""),
];

const state = (run, params) => [
  run.problems.length ? h("section", { class: "problems" }, h("h2", null, "What was wrong"),
    h("ul", null, run.problems.map((text) => h("li", null, text))),
    h("p", null, h("a", { href: link("why", { run: params.run }) }, "Why is it not learning?"))) : null,
  h("dl", { class: "facts" }, Object.entries(run.facts).map(([name, text]) => h("div", null, h("dt", null, name), h("dd", null, text)))),
];

export const draw = (curves) => [...curves.charts.map(lineChart), curves.time ? stackedBars(curves.time) : null].filter(Boolean);

export const overview = async ({ params, every }) => {
  const [run, curves] = await Promise.all([get("overview", { run: params.run }), get("curves", { run: params.run })]);
  const title = h("div", null, head(run));
  const charts = h("div", { class: "charts", "data-step": curves.step ?? 0 }, draw(curves));
  if (!curves.charts.length) charts.append(h("p", { class: "muted" }, "No metrics yet (trainer.logger needs jsonl)."));
  const below = h("div", null, state(run, params));
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
  return [title, charts, below];
};
