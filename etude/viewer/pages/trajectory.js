// One trajectory: the conversation by provenance, its tool calls, and its tokens with the trainer's values.
import { get } from "./api.js";
import { block, h, link, lists, number, seconds, signed } from "./dom.js";
import { plainTable } from "./trajectories.js";

const minus = (a, b) => (lists(a) && lists(b) ? a - b : null);

// Quantities that can colour tokens: name, value of a token, kind of scale, note.
const QUANTITIES = [
  ["mask", null, "", "who wrote a token; only the model's are trained on"],
  ["log-prob", (t) => t.log_prob, "low", "nats, of the engine that sampled"],
  ["advantage", (t) => t.advantages, "diverging", "how much better than expected"],
  ["ratio", (t) => { const d = minus(t.log_probs, t.old_log_probs ?? t.log_probs); return lists(d) ? Math.exp(d) : null; }, "one", "π in the update ⁄ π before it"],
  ["entropy", (t) => t.entropys, "high", "nats, of the trainer's distribution"],
  ["mismatch", (t) => minus(t.old_log_probs ?? t.log_probs, t.log_prob), "diverging", "trainer's log-prob − engine's, nats"],
  ["reward", (t) => (t.reward ? t.reward : null), "diverging", "placed on this token"],
];

const bucket = (value, kind, [low, high]) => {
  if (!lists(value)) return "";
  if (kind === "diverging" || kind === "one") {
    const centre = kind === "one" ? 1 : 0;
    const reach = Math.max(Math.abs(low - centre), Math.abs(high - centre)) || 1;
    return `d${Math.round(5 + (5 * (value - centre)) / reach)}`;
  }
  const share = high > low ? (value - low) / (high - low) : 0;
  return `v${Math.round(10 * (kind === "low" ? 1 - share : share))}`;
};

const range = (tokens, of) => tokens.reduce(([low, high], token) => {
  const value = of(token);
  return lists(value) ? [Math.min(low, value), Math.max(high, value)] : [low, high];
}, [Infinity, -Infinity]);

const say = (token, at) => [
  ["token", at], ["id", token.id], ["text", JSON.stringify(token.text)], ["from", token.from], ["turn", token.turn],
  ["weights", token.version], ["log-prob", token.log_prob], ["advantage", token.advantages],
  ["trainer before", token.old_log_probs], ["in the update", token.log_probs], ["reference", token.ref_log_prob],
  ["entropy", token.entropys], ["value", token.values],
  ["ratio", QUANTITIES[3][1](token)], ["mismatch", QUANTITIES[5][1](token)], ["reward", token.reward || null],
].filter(([, value]) => lists(value)).map(([name, value]) => h("span", null, h("i", null, name), " ", typeof value === "number" && !Number.isInteger(value) ? number(value, 5) : value, " "));

const visible = (text, id, known) => (known ? text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥") || "∅" : text || `‹${id}›`);

const tokenView = async (place, params, sequence, onKey) => {
  const query = { run: params.run, place, sequence: sequence || "" };
  const box = h("div", { class: "tokens", "data-by": "mask" });
  const reading = h("p", { class: "numbers", role: "status" }, "Point at a token, or move with ← →.");
  const scale = h("p", { class: "scale muted" });
  const more = h("p");
  const tokens = [];
  let by = 0;
  let known = true;
  const colour = () => {
    const [name, of, kind, note] = QUANTITIES[by];
    const between = of ? range(tokens, of) : null;
    const missing = of && between[0] === Infinity;
    [...box.children].forEach((span, i) => { span.className = `tok ${of ? bucket(of(tokens[i]), kind, between) : tokens[i].from}`; });
    box.dataset.by = name;
    scale.replaceChildren(missing ? `this dump has no ${name} of its tokens (trainer.rollout_token_values)`
      : of ? `${note}; ${number(between[0])} to ${number(between[1])}` : note);
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(i === by)));
  };
  const buttons = QUANTITIES.map(([name], i) => h("button", { onclick: () => { by = i; colour(); } }, name));
  const point = (target) => { const at = [...box.children].indexOf(target); if (at >= 0) reading.replaceChildren(...say(tokens[at], at)); };
  box.addEventListener("pointerover", (event) => point(event.target));
  box.addEventListener("focusin", (event) => point(event.target));
  const load = async () => {
    const found = await get("tokens", { ...query, offset: tokens.length || "" });
    const columns = Object.entries(found.columns);
    known = found.tokenizer;
    for (let i = 0; i < found.columns.id.length; i++) {
      const token = Object.fromEntries(columns.map(([name, column]) => [name, column[i]]));
      tokens.push(token);
      box.append(h("span", { tabindex: -1 }, visible(token.text, token.id, known)));
    }
    more.replaceChildren(tokens.length < found.total
      ? h("button", { onclick: load }, `${number(Math.min(found.page, found.total - tokens.length))} more of ${number(found.total)} tokens`) : `${number(found.total)} tokens`);
    if (!known) more.append(" · no tokenizer.json in the run's checkpoints or model folder: a part's text stands at its first token");
    colour();
  };
  onKey((key, event) => {
    if (key === "c") { by = (by + 1) % QUANTITIES.length; colour(); }
    if ((key !== "ArrowRight" && key !== "ArrowLeft") || !box.children.length) return;
    const next = box.contains(document.activeElement) ? (key === "ArrowRight" ? document.activeElement.nextSibling : document.activeElement.previousSibling) : box.firstChild;
    next?.focus();
    event.preventDefault();
  });
  try { await load(); } catch (error) { return h("p", { class: "muted" }, error.message); }
  return [h("div", { class: "modes", role: "group", "aria-label": "colour by" }, buttons), scale, reading, box, more];
};

const call = (each) => h("details", { class: each.error ? "call bad" : "call" },
  h("summary", null, "called ", h("b", null, each.name), each.seconds ? ` ${seconds(each.seconds)}` : "", each.reward ? ` · reward ${number(each.reward)}` : "",
    each.source === "unanswered" ? " · unanswered" : each.source && each.source !== "tool" ? ` · from ${each.source}` : "", each.retries ? ` · ${each.retries} retries` : "", each.error ? h("b", { class: "bad" }, ` · ${each.error}`) : ""),
  block("sampled", "arguments", each.arguments ?? ""), block("tool", "result", each.response ?? ""));

// `beside`: rollouts of the same prompt, whose mean score stands in where the dump has no advantage.
const head = ({ row, advantage }, beside = []) => {
  const mean = beside.reduce((sum, each) => sum + each.score, 0) / beside.length;
  const gain = lists(advantage) ? ` · advantage ${signed(advantage)}` : beside.length > 1 ? ` · ${signed(row.score - mean)} to the mean of its prompt` : "";
  return [
    h("p", { class: "lead" }, "score ", h("b", { class: "score" }, number(row.score)), gain, ` · ${row.stop.replaceAll("_", " ")} · step ${row.step} · ${row.uid}${row.source ? ` · ${row.source}` : ""}`),
    Object.keys(row.rewards).length ? h("p", null, Object.entries(row.rewards).map(([name, value]) => h("span", { class: "flag" }, `${name === "score" ? "reward function" : `reward of ${name}`} ${number(value)}`))) : null,
  ];
};

const exact = (sequence) => sequence.blocks.map((each) => block(each.kind, each.label, each.text, each.omitted));

// As messages, each call folded after the turn that made it; as exact text where no messages were recorded. `whole`: a prompt
// is shown, not folded.
export const conversation = (found, whole = true) => {
  const left = new Set(found.calls);
  const take = (turn) => [...left].filter((each) => each.turn === turn && left.delete(each)).map(call);
  const message = (each, main) => [block(each.kind, each.label, each.text, each.omitted), main && lists(each.turn) ? take(each.turn) : null];
  const said = ({ messages }, main) => {
    const asked = whole ? 0 : Math.max(messages.findIndex((each) => lists(each.turn)) - 1, 0);
    const shown = messages.map((each) => message(each, main));
    return [asked ? h("details", null, h("summary", null, `${asked} ${asked === 1 ? "message" : "messages"} before`), shown.slice(0, asked)) : null, shown.slice(asked)];
  };
  const sequences = found.sequences.map((sequence, i) => h("article", { class: "talk" },
    found.sequences.length > 1 ? h("h3", null, `sequence ${i + 1} of ${found.sequences.length}`) : null,
    sequence.messages.length ? said(sequence, i + 1 === found.sequences.length) : exact(sequence),
    h("dl", { class: "inline" }, sequence.facts.map(([name, text]) => h("div", null, h("dt", null, name), h("dd", null, text))))));
  return [sequences, left.size ? h("section", null, h("h3", null, "Tool calls"), [...left].map(call)) : null,
    found.calls_omitted ? h("p", { class: "muted" }, `… ${number(found.calls_omitted)} more calls`) : null];
};

// A trajectory beside others; `label` says which it is.
const column = async (place, run, label = "", alone = true) => {
  const found = await get("trajectory", { run, place });
  const name = label ? `${label}, step ${found.row.step}` : place;
  return h("div", { class: "column", "data-label": label || null }, h("h3", null, h("a", { href: link("trajectory", { run, place }) }, name)), head(found, alone ? [] : found.siblings), conversation(found, false));
};

// Trajectories side by side, each [place, run, label]; without a place, its prompt was not sampled again. `alone`: they are not
// rollouts of one prompt.
export const sideBySide = async (entries, alone = true) => h("div", { class: "columns" }, await Promise.all(entries.map(([place, run, label]) =>
  (place ? column(place, run, label, alone).catch((error) => h("div", { class: "column muted" }, error.message)) : h("div", { class: "column muted" }, "This prompt was not sampled again in the last dump.")))));

export const trajectory = async ({ params, go, onKey }) => {
  const place = params.place ?? "";
  const found = await get("trajectory", { run: params.run, place });
  const last = found.sequences.length - 1;
  const tokens = h("div", { id: "tokens" });
  const open = async (sequence) => tokens.replaceChildren(...[await tokenView(place, params, sequence, onKey)].flat());
  const raw = h("details", { id: "raw", ontoggle: () => { if (raw.open && !tokens.childNodes.length) open(last); } },
    h("summary", null, h("h2", null, "Raw tokens")),
    last ? h("p", null, found.sequences.map((_, i) => h("button", { onclick: () => open(i) }, `sequence ${i + 1}`))) : null, tokens,
    found.sequences[last].messages.length ? [h("h3", null, "Exact text, by who wrote it"), found.sequences.map(exact)] : null);
  const to = (where) => where && go("trajectory", { place: where });
  onKey((key) => {
    if (key === "n") to(found.after);
    if (key === "p") to(found.before);
    if (key === "r") raw.open = !raw.open;
    if (key === "u") history.length > 1 ? history.back() : go("trajectories", {});
  });
  return [
    h("h1", null, place), head(found, found.siblings),
    h("p", { class: "pager" }, found.before ? h("a", { href: link("trajectory", { run: params.run, place: found.before }) }, "← previous") : "", " ",
      found.after ? h("a", { href: link("trajectory", { run: params.run, place: found.after }) }, "next →") : ""),
    h("section", null, h("h2", null, "Conversation"), conversation(found)), raw,
    found.siblings.length > 1 ? h("section", null, h("h2", null, "Other rollouts of this prompt"), plainTable(found.siblings, params),
      h("p", null, h("a", { href: link("compare", { run: params.run, siblings: place }) }, "side by side"))) : null,
  ].filter(Boolean);
};
