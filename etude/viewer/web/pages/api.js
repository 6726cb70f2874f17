// Answers of the server; on a page that was exported, those embedded in it.

const embedded = document.getElementById("data");
const data = embedded ? JSON.parse(embedded.textContent) : null;
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
  const found = data[address(path, params)] ?? data[path];
  if (!found) throw new Error("not in this export; open the run with  etude view DIR --web");
  return found;
};

// What the server does for a live run, over the rows that were exported.
const filtered = (list, { q, stop, tool, source, step, sort, desc, offset }) => {
  const wanted = (q ?? "").toLowerCase();
  const rows = list.rows.filter((row) => (!stop || row.stop === stop) && (!source || row.source === source)
    && (!step || String(row.step) === step) && (!tool || row.tools.includes(tool))
    && (!wanted || JSON.stringify(row).toLowerCase().includes(wanted)));
  if (sort) rows.sort((a, b) => (a[sort] < b[sort] ? -1 : a[sort] > b[sort] ? 1 : 0) * (desc ? -1 : 1));
  return { ...list, total: rows.length, rows: rows.slice(Number(offset ?? 0), Number(offset ?? 0) + 100) };
};
