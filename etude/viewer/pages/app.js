// Router and frame: the URL hash selects the page and the run; this file draws the frame and handles keys.
import { exported, exportedPlace, get } from "./api.js";
import { h, link, select } from "./dom.js";
import { overview, WORDS } from "./overview.js";
import { why } from "./why.js";
import { trajectories } from "./trajectories.js";
import { trajectory } from "./trajectory.js";
import { timeline } from "./timeline.js";
import { compare } from "./compare.js";

const PAGES = { overview, why, trajectories, timeline, compare, trajectory };
const NAV = [["overview", "Overview"], ["why", "Why is it not learning?"], ["trajectories", "Trajectories"],
  ["timeline", "Timeline"], ["compare", "Compare"]];
const KEYS = [["1 … 5", "the pages"], ["/", "search"], ["j, k", "next, previous trajectory"], ["Enter", "open it"],
  ["n, p", "next, previous of the run (on a trajectory)"], ["r", "raw tokens"], ["c", "colour them by the next quantity"],
  ["← →", "move along the tokens"], ["u", "back to the list"], ["t", "dark or light"], ["?", "this help"], ["Esc", "close it"]];
const POLL = 2000;
const LOOK = 5000; // at how the run stands

const main = document.getElementById("main");
let leave = () => {};
let drawn = 0;

const parse = () => {
  const [page, query] = location.hash.replace(/^#\//, "").split("?");
  const params = Object.fromEntries(new URLSearchParams(query ?? ""));
  if (exportedPlace) params.place ??= exportedPlace;
  return { page: page in PAGES ? page : exported && document.getElementById("data").dataset.page || "overview", params };
};

const nav = (page, params) => {
  const offered = exported ? NAV.filter(([name]) => document.getElementById("data").dataset.pages.split(" ").includes(name)) : NAV;
  document.getElementById("nav").replaceChildren(...offered.map(([name, text], i) =>
    h("a", { href: link(name, { run: params.run }), "aria-current": name === page ? "page" : null, "data-key": i + 1 }, text)));
};

const draw = async () => {
  const { page, params } = parse();
  const number = ++drawn;
  leave();
  leave = () => {};
  nav(page, params);
  const stop = new AbortController();
  const context = {
    params,
    page,
    go: (to, changed) => { location.hash = link(to, { run: params.run, ...changed }).slice(1); },
    // Calls `work` every two seconds while this page is open and the tab visible.
    every: (work) => {
      if (exported) return;
      const timer = setInterval(async () => {
        if (document.hidden) return;
        try { await work(); } catch { live("the server does not answer"); }
      }, POLL);
      stop.signal.addEventListener("abort", () => clearInterval(timer));
    },
    // Draws the page again when there are new metrics.
    follow: async () => {
      if (exported) return;
      const { version } = await get("curves", { run: params.run });
      context.every(async () => { if ((await get("curves", { run: params.run, version })).version !== version) draw(); });
    },
    onKey: (handler) => document.addEventListener("keydown", (event) => { if (!typing(event)) handler(event.key, event); }, { signal: stop.signal }),
  };
  leave = () => stop.abort();
  try {
    const content = await PAGES[page](context);
    if (number === drawn) main.replaceChildren(...[content].flat(Infinity).filter(Boolean));
  } catch (error) {
    if (number === drawn) main.replaceChildren(h("p", { class: "problem", role: "alert" }, error.message));
  }
  if (number === drawn) main.dataset.page = page;
};

const live = (text) => { document.getElementById("live").textContent = text; };
const typing = (event) => event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);

// The choice of runs, and how the one that is looked at stands now.
const runs = async () => {
  const { runs: known } = await get("runs");
  const { page, params } = parse();
  const now = known.find((run) => run.name === params.run) ?? known[0];
  live(now.status === "running" ? `live: step ${now.step}${now.total ? ` of ${now.total}` : ""}` : WORDS[now.status] ?? now.status);
  const place = document.getElementById("run");
  if (known.length < 2 || place.contains(document.activeElement)) return;
  place.replaceChildren(select("run", known.map((run) => [run.name, `${run.title} (${WORDS[run.status] ?? run.status})`]), now.name,
    (name) => { location.hash = link(page === "trajectory" ? "trajectories" : page, { run: name }).slice(1); }));
};
const look = () => { if (!exported && !document.hidden) runs().catch(() => live("the server does not answer")); };

const theme = (chosen) => {
  if (chosen) document.documentElement.dataset.theme = chosen;
  try { chosen ? localStorage.setItem("theme", chosen) : (document.documentElement.dataset.theme = localStorage.getItem("theme") ?? ""); } catch { /* no storage */ }
};
const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
const turn = () => theme(isDark() ? "light" : "dark");

const keys = document.getElementById("keys");
const help = () => (keys.open ? keys.close() : keys.showModal());
keys.append(h("h2", null, "Keys"), h("dl", null, KEYS.map(([key, text]) => h("div", null, h("dt", null, h("kbd", null, key)), h("dd", null, text)))),
  h("form", { method: "dialog" }, h("button", { autofocus: true }, "close")));

document.addEventListener("keydown", (event) => {
  if (typing(event)) return event.key === "Escape" && event.target.blur();
  const target = document.querySelector(`#nav a[data-key="${CSS.escape(event.key)}"]`);
  if (target) target.click();
  else if (event.key === "t") turn();
  else if (event.key === "?") help();
  else if (event.key === "/" && document.getElementById("search")) { event.preventDefault(); document.getElementById("search").focus(); }
});
document.getElementById("theme").addEventListener("click", turn);
document.getElementById("help").addEventListener("click", help);
addEventListener("hashchange", () => { draw(); look(); });
// Names the run to open, so that another one which starts meanwhile does not take its place.
const open = async () => {
  const { page, params } = parse();
  if (exported || params.run) return;
  const { runs: known } = await get("runs");
  if (known.length > 1) history.replaceState(null, "", link(page, { ...params, run: known[0].name }));
};
theme();
open().catch(() => {}).then(() => { draw(); look(); });
setInterval(look, LOOK);
