// Line charts and stacked bars as SVG; colours are CSS classes, so that charts work in both themes and in print.
import { h, number, percent, svg } from "./dom.js";

const WIDE = 520, HIGH = 210, LEFT = 46, BOTTOM = 22, TOP = 8, RIGHT = 8;

const ticks = (low, high, count = 4) => {
  const rough = (high - low) / count || 1;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * unit).find((m) => m >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step) found.push(Number(at.toPrecision(12)));
  return found;
};

const frame = (title, xs, low, high, form) => {
  const [first, last] = [Math.min(...xs), Math.max(...xs)];
  const x = (value) => LEFT + ((WIDE - LEFT - RIGHT) * (value - first)) / (last - first || 1);
  const y = (value) => HIGH - BOTTOM - ((HIGH - BOTTOM - TOP) * (value - low)) / (high - low || 1);
  const drawing = svg("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": title });
  for (const at of ticks(low, high)) {
    drawing.append(svg("line", { class: "grid", x1: LEFT, x2: WIDE - RIGHT, y1: y(at), y2: y(at) }),
      svg("text", { class: "axis", x: LEFT - 6, y: y(at) + 4, "text-anchor": "end" }, form(at)));
  }
  for (const at of ticks(first, last, 6).filter(Number.isInteger)) {
    drawing.append(svg("text", { class: "axis", x: x(at), y: HIGH - 5, "text-anchor": "middle" }, at));
  }
  return { drawing, x, y };
};

const legend = (lines) => (lines.length < 2 ? null : h("ul", { class: "legend" },
  lines.map((line) => h("li", null, h("i", { class: `c${line.colour} ${line.dashed ? "dashed" : ""}` }), line.label))));

// A cross-hair, with the values at the step nearest to the pointer.
const hover = (drawing, xs, x, say) => {
  const hair = svg("line", { class: "hair", y1: TOP, y2: HIGH - BOTTOM, visibility: "hidden" });
  const reading = h("output", { class: "reading" });
  drawing.append(hair);
  const leave = () => { hair.setAttribute("visibility", "hidden"); reading.textContent = ""; };
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const at = ((event.clientX - box.left) * WIDE) / box.width;
    const nearest = xs.reduce((best, step) => (Math.abs(x(step) - at) < Math.abs(x(best) - at) ? step : best), xs[0]);
    hair.setAttribute("x1", x(nearest));
    hair.setAttribute("x2", x(nearest));
    hair.setAttribute("visibility", "visible");
    reading.replaceChildren(`step ${nearest}: ${say(nearest)}`);
  });
  drawing.addEventListener("pointerleave", leave);
  return reading;
};

const card = (chart, drawing, lines, reading) => h("figure", { "data-chart": chart.title },
  h("h3", null, chart.title), legend(lines), drawing, reading, h("figcaption", null, chart.note, " ", chart.summary));

// Moving average of a long line (half-width: a twentieth of it); null for a short one.
const average = (values) => {
  const half = Math.floor(values.length / 20);
  return half < 2 ? null : values.map((_, i) => { const part = values.slice(Math.max(0, i - half), i + half + 1); return part.reduce((a, b) => a + b, 0) / part.length; });
};

// chart: {title, note, summary, percent, lines: [{label, steps, values, low?, high?, marks?, dashed?, colour?}]}
export const lineChart = (chart) => {
  const lines = chart.lines.map((line, i) => ({ ...line, colour: line.colour ?? i % 8 }));
  const xs = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const all = lines.flatMap((line) => [...line.values, ...(line.low ?? []), ...(line.high ?? [])]);
  let [low, high] = chart.percent ? [0, 1] : [Math.min(...all), Math.max(...all)];
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const form = chart.percent ? percent : number;
  const { drawing, x, y } = frame(chart.title, xs, low, high, form);
  const path = (steps, values) => steps.map((step, i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(values[i]).toFixed(1)}`).join("");
  for (const line of lines) {
    if (line.low && !line.marks) {
      const back = path([...line.steps].reverse(), [...line.low].reverse()).replace("M", "L");
      drawing.append(svg("path", { class: `band c${line.colour}`, d: `${path(line.steps, line.high)}${back}Z` }));
    }
    const smooth = line.marks ? null : average(line.values);
    if (smooth) drawing.append(svg("path", { class: `faint c${line.colour}`, d: path(line.steps, line.values) }));
    drawing.append(svg("path", { class: `line c${line.colour} ${line.dashed ? "dashed" : ""}`, d: path(line.steps, smooth ?? line.values) }));
    line.steps.forEach((step, i) => {
      if (line.marks && line.low) drawing.append(svg("line", { class: `line c${line.colour}`, x1: x(step), x2: x(step), y1: y(line.low[i]), y2: y(line.high[i]) }));
      if (line.marks || line.steps.length < 3) drawing.append(svg("circle", { class: `dot c${line.colour}`, cx: x(step), cy: y(line.values[i]), r: 3 }));
    });
  }
  const values = lines.map((line) => [line.label, new Map(line.steps.map((step, i) => [step, line.values[i]]))]);
  const say = (step) => values.filter(([, of]) => of.has(step)).map(([label, of]) => `${label} ${form(of.get(step))}`).join(" · ");
  return card(chart, drawing, lines, hover(drawing, xs, x, say));
};

// chart: {title, note, summary, steps, parts: {name: values}}: one stacked bar per step.
export const stackedBars = (chart) => {
  const names = Object.keys(chart.parts);
  const sums = chart.steps.map((_, i) => names.reduce((sum, name) => sum + chart.parts[name][i], 0));
  const { drawing, x, y } = frame(chart.title, chart.steps, 0, Math.max(...sums), number);
  const wide = Math.max(1, Math.min(18, (0.85 * (WIDE - LEFT - RIGHT)) / chart.steps.length));
  chart.steps.forEach((step, i) => {
    let base = 0;
    names.forEach((name, colour) => {
      const value = chart.parts[name][i];
      drawing.append(svg("rect", { class: `bar c${colour}`, x: x(step) - wide / 2, width: wide, y: y(base + value), height: Math.max(0, y(base) - y(base + value)) }));
      base += value;
    });
  });
  const say = (step) => names.map((name) => `${name} ${number(chart.parts[name][chart.steps.indexOf(step)])} s`).join(" · ");
  return card(chart, drawing, names.map((label, colour) => ({ label, colour })), hover(drawing, chart.steps, x, say));
};
