// DOM helpers. Data is inserted only as text nodes and attributes: no markup is ever parsed.

// Control characters and bidirectional overrides.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

export const clean = (value) => String(value).replace(HIDDEN, "\ufffd");

const fill = (element, props, children) => {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "selected") element[name] = value;
    else if (name === "href" && !value.startsWith("#")) throw new Error(`a link to ${value}`);
    else element.setAttribute(name, value === true ? "" : clean(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(clean(child)));
  }
  return element;
};

export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);
export const svg = (tag, props, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);

export const lists = (value) => value !== null && value !== undefined;
export const number = (value, digits = 3) => {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 1e-3 || value === 0 ? String(Number(value.toPrecision(digits))) : value.toExponential(1);
};
export const signed = (value) => (value > 0 ? "+" : "") + number(value);
// Halves go to the even number, as in what Python writes.
const whole = (value) => (Math.abs(value % 1) === 0.5 ? 2 * Math.round(value / 2) : Math.round(value));
export const percent = (value) => (typeof value === "number" ? `${whole(100 * value)} %` : "–");
export const seconds = (value) => (typeof value !== "number" ? "–" : value > 0 && value < 0.01 ? `${number(1000 * value, 2)} ms` : `${number(value)} s`);

export const link = (page, params) => {
  const query = new URLSearchParams(Object.entries(params ?? {}).filter(([, v]) => v !== "" && v !== null && v !== undefined));
  return `#/${page}${query.size ? `?${query}` : ""}`;
};

export const select = (label, options, value, onchange) => h("label", { class: "field" }, label,
  h("select", { onchange: (event) => onchange(event.target.value) },
    options.map(([key, text]) => h("option", { value: String(key), selected: String(key) === String(value ?? "") }, text))));

export const block = (kind, label, text, omitted) => h("div", { class: `block ${kind}`, role: "group", "aria-label": label },
  h("span", { class: "who" }, label), h("pre", { dir: "auto", tabindex: text.length > 800 ? 0 : null }, text),
  omitted ? h("small", null, `… ${number(omitted)} more characters`) : null);

export const table = (heads, rows, props) => h("div", { class: "wrap" }, h("table", props,
  h("thead", null, h("tr", null, heads)), h("tbody", null, rows)));
