"""The page for people: cells, pairs, quorum, versions and last events, refreshing by itself. No file but this one."""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>cells</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; --line: #8884; --good: #2a7d46; --warn: #a86b00; --bad: #b3261e; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.25rem; margin: 0 0 .25rem; } h2 { font-size: 1rem; margin: 1.5rem 0 .4rem; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .25rem .6rem .25rem 0; }
tr { border-bottom: 1px solid var(--line); } th { font-weight: 600; }
.state { font-weight: 600; } .good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); }
#events { font: 12.5px/1.5 ui-monospace, monospace; overflow-x: auto; white-space: pre; }
#stale { display: none; color: var(--bad); }
</style></head><body>
<h1>Cells of this run</h1><div id="summary">connecting …</div><div id="stale">no answer; what is shown is old</div>
<h2>Trainer cells</h2><table id="trainer"></table>
<h2>Rollout cells</h2><table id="rollout"></table>
<h2>Last events</h2><div id="events"></div>
<script>
const good = ["alive", "healthy"], bad = ["dead", "given up", "given_up"];
function cell(row, text, name) {
  const td = row.insertCell(); td.textContent = text; if (name) td.className = name;
}
function table(id, head, rows) {
  const t = document.getElementById(id); t.replaceChildren();
  const h = t.insertRow();
  for (const name of head) { const th = document.createElement("th"); th.textContent = name; h.append(th); }
  for (const r of rows) { const row = t.insertRow(); r.forEach((v, i) => cell(row, v ?? "–", i == 1 ? "state " +
    (good.includes(v) ? "good" : bad.includes(v) ? "bad" : "warn") : "")); }
}
async function turn() {
  const stale = document.getElementById("stale");
  try {
    const s = await (await fetch("status", {cache: "no-store"})).json(); stale.style.display = "none";
    document.getElementById("summary").textContent = `rollout ${s.rollout_id} · weight version ${s.version} · quorum ` +
      `${s.quorum.quorum_id} of cells ${s.quorum.members.map(m => m[0]).join(", ") || "none"}` +
      (s.tokens_per_s == null ? "" : ` · ${Math.round(s.tokens_per_s)} tokens/s`);
    table("trainer", ["cell", "state", "incarnation", "restarts", "cause"],
      s.trainer.map(c => [c.cell, c.state, c.incarnation, c.restarts, c.cause]));
    table("rollout", ["cell", "state", "incarnation", "weight version", "pair", "cause"],
      s.rollout.map(c => [c.cell, c.state, c.incarnation, c.version, c.pair, c.cause]));
    document.getElementById("events").textContent = s.events.map(e =>
      `${new Date(e.time * 1000).toLocaleTimeString()}  ${e.kind.padEnd(15)} ${e.text}`).reverse().join("\\n");
  } catch (error) { stale.style.display = "block"; }
}
turn(); setInterval(turn, 2000);
</script></body></html>
"""
