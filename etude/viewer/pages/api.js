// Fetches JSON from the server; an exported page reads its embedded data instead.

const embedded = document.getElementById("data");
const data = embedded ? JSON.parse(embedded.textContent) : null;
export const exportedPlace = embedded ? JSON.parse(document.getElementById("place").textContent) : null;
export const exported = data !== null;

const address = (path, params) => {
  const query = new URLSearchParams(Object.entries(params ?? {}).filter(([, v]) => v !== "" && v !== null && v !== undefined));
  query.sort();
  return `${path}${query.size ? `?${query}` : ""}`;
};

export const get = async (path, params) => {
  if (exported) return offline(path, params ?? {});
  const response = await fetch(`api/${address(path, params)}`);
  const answer = await response.json();
  if (!response.ok) throw new Error(typeof answer.detail === "string" ? answer.detail : `the server answers ${response.status}`);
  return answer;
};

const offline = (path, params) => {
  if (path === "trajectories") return filtered(data.trajectories, params);
  const { step, version, ...rest } = params; // an export holds one step and never changes
  const found = data[address(path, rest)];
  if (!found) throw new Error("not in this export; open the run with  etude view DIR --web");
  return found;
};

// Filters and sorts the exported rows, as the server does for a live run.
const SORTS = { tokens: "response_tokens", stop_reason: "stop", data_source: "source" };
const filtered = (list, { q, stop, tool, source, flag, split, step, sort, desc, offset }) => {
  const wanted = (q ?? "").toLowerCase();
  const rows = list.rows.filter((row) => (!stop || row.stop === stop) && (!source || row.source === source)
    && (!step || String(row.step) === String(step)) && (!tool || row.tools.includes(tool))
    && (!flag || row.flags.includes(flag)) && (!split || row.split === split)
    && (!wanted || JSON.stringify(row).toLowerCase().includes(wanted)));
  const by = SORTS[sort] ?? sort;
  rows.sort((a, b) => (a[by] < b[by] ? -1 : a[by] > b[by] ? 1 : 0) * (desc ? -1 : 1));
  const from = Number(offset || 0);
  return { ...list, total: rows.length, offset: from, rows: rows.slice(from, from + list.page) };
};
