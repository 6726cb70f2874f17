// The paginated list of trajectories: search, filters, sorting, groups.
import { exported, get } from "./api.js";
import { h, link, number, seconds, select, table } from "./dom.js";

const COLUMNS = [["step", "step", "n"], ["", "question, and last line", ""], ["data_source", "source", "opt"], ["score", "score", "n"],
  ["stop_reason", "ended", "opt"], ["turns", "turns", "n opt"], ["calls", "calls", "n"], ["tokens", "tokens", "n opt"], ["seconds", "time", "n opt"], ["", "flags", "opt"]];
const SORTED = new Set(["step", "score", "turns", "calls", "tokens", "seconds", "stop_reason", "data_source"]);

const cells = (row, address, flags) => [
  h("td", { class: "n" }, row.step),
  h("td", { class: "text" }, h("a", { href: address, tabindex: -1, title: `${row.question} (${row.place}, prompt ${row.uid})` }, row.question || row.uid), h("span", null, row.answer)),
  h("td", { class: "opt word" }, row.source), h("td", { class: "n" }, number(row.score)), h("td", { class: "opt word" }, row.stop.replaceAll("_", " ")), h("td", { class: "n opt" }, row.turns),
  h("td", { class: "n" }, row.calls, row.call_errors ? h("b", { class: "bad", title: "calls that failed" }, ` −${row.call_errors}`) : ""),
  h("td", { class: "n opt" }, number(row.response_tokens)), h("td", { class: "n opt" }, seconds(row.seconds)),
  h("td", { class: "opt" }, row.flags.map((flag) => h("span", { class: "flag", title: flags?.[flag] ?? flag }, flag.replaceAll("_", " ")))),
];

export const rowOf = (row, params, flags) => {
  const address = link("trajectory", { run: params.run, place: row.place });
  return h("tr", { tabindex: 0, "data-place": row.place, onclick: () => { location.hash = address.slice(1); },
    onkeydown: (event) => { if (event.key === "Enter") location.hash = address.slice(1); } }, cells(row, address, flags));
};

const heads = (params, sort) => COLUMNS.map(([key, text, kind]) => {
  if (!SORTED.has(key)) return h("th", { class: kind }, text);
  const on = params.sort === key;
  return h("th", { class: kind, "aria-sort": on ? (params.desc ? "descending" : "ascending") : null },
    h("button", { onclick: () => sort(key, on && !params.desc ? 1 : "") }, text, on ? (params.desc ? " ↓" : " ↑") : ""));
});

export const plainTable = (rows, params, flags) => table(COLUMNS.map(([, text, kind]) => h("th", { class: kind }, text)), rows.map((row) => rowOf(row, params, flags)), { class: "list" });

const groupOf = (group, params, flags) => h("details", { class: "group", open: group.size <= 16 },
  h("summary", null, `${group.rows[0].question || group.uid}, step ${group.step}: ${group.size} rollouts, score ${number(group.mean)} ± ${number(group.std)}`),
  plainTable(group.rows, params, flags),
  h("p", null, h("a", { href: link("compare", { run: params.run, siblings: group.rows[0].place }) }, "side by side")));

const bar = (params, choices, change) => {
  const choice = (name, label, values) => select(label, [["", "all"], ...values.map((value) => [value, String(value).replaceAll("_", " ")])], params[name], (value) => change({ [name]: value }));
  const entry = (name, label, props) => h("label", { class: "field" }, label, h("input", { name, value: params[name] ?? "", onchange: (event) => change({ [name]: event.target.value }), ...props }));
  const tick = (name, label) => h("label", { class: "tick" }, h("input", { type: "checkbox", name, checked: Boolean(params[name]), onchange: (event) => change({ [name]: event.target.checked ? 1 : "" }) }), label);
  return h("form", { class: "bar", onsubmit: (event) => event.preventDefault() },
    entry("q", "search", { type: "search", id: "search", maxlength: 500, placeholder: "text of prompt or answer" }), exported ? null : tick("regex", "regex"),
    choice("stop", "ended", choices.stop_reason), choice("tool", "tool", choices.tool), choice("source", "source", choices.data_source),
    choice("flag", "flag", choices.flag), choice("split", "split", choices.split), choice("step", "step", choices.step),
    exported ? null : [entry("low", "score from", { type: "number", step: "any" }), entry("high", "to", { type: "number", step: "any" }), tick("group", "group by prompt")]);
};

const page = (found, params) => {
  if (found.groups) return found.groups.map((group) => groupOf(group, params, found.choices.flags));
  return found.rows;
};

export const trajectories = async ({ params, go, every, onKey }) => {
  const wanted = { ...params, uid: "" };
  if (!params.sort) Object.assign(wanted, { sort: "step", desc: 1 }); // newest first
  let found = await get("trajectories", wanted);
  const change = (changed) => go("trajectories", { ...params, offset: "", ...changed });
  const count = h("p", { class: "muted", role: "status" });
  const content = h("div", { id: "list" });
  const pager = h("p", { class: "pager" });
  const show = () => {
    const unit = found.groups ? "groups" : "trajectories";
    count.textContent = `${number(found.total)} ${unit}${found.total !== found.all && !found.groups ? ` of ${number(found.all)}` : ""}${found.part ? " in this file" : ""}`
      + (found.complete ? "" : ` so far (${number(found.searched)} searched; still reading)`);
    content.dataset.total = found.total;
    const items = page(found, params);
    if (found.groups) {
      content.replaceChildren(...items);
      if (params.uid) content.replaceChildren(...items.filter((item, i) => found.groups[i].uid === params.uid), ...items.filter((item, i) => found.groups[i].uid !== params.uid));
    } else content.replaceChildren(table(heads(params, (sort, desc) => change({ sort, desc })), items.map((row) => rowOf(row, params, found.choices.flags)), { class: "list" }));
    const next = found.offset + found.page;
    pager.replaceChildren(
      found.offset > 0 ? h("a", { href: link("trajectories", { ...params, offset: Math.max(0, found.offset - found.page) || "" }) }, "← previous") : "",
      ` ${number(Math.min(found.offset + 1, found.total))} to ${number(Math.min(next, found.total))} `,
      next < found.total ? h("a", { href: link("trajectories", { ...params, offset: next }) }, "next →") : "");
  };
  show();
  every(async () => {
    const now = await get("trajectories", wanted);
    if (now.version === found.version && now.complete === found.complete) return;
    const place = document.activeElement?.dataset?.place;
    found = now;
    show();
    if (place) content.querySelector(`[data-place="${CSS.escape(place)}"]`)?.focus();
  });
  onKey((key) => {
    if (key !== "j" && key !== "k") return;
    const rows = [...content.querySelectorAll("tr[data-place]")];
    const at = rows.indexOf(document.activeElement);
    rows[key === "j" ? Math.min(at + 1, rows.length - 1) : Math.max(at - 1, 0)]?.focus();
  });
  return [h("h1", null, "Trajectories"), bar(params, found.choices, change), count, content, pager];
};
