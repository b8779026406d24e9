// What was compiled, the totals, and what the passes did and noted.

function tile(label, value, remark, warns) {
  return make("div", { class: warns ? "tile warns" : "tile" },
    make("span", { class: "label" }, label), make("strong", {}, value), make("span", { class: "remark" }, remark));
}

function tiles() {
  const step = report.prediction;
  const total = sum(collectives.map((each) => each.bytes));
  const exposed = collectives.filter((each) => each.exposed > 0).length;
  const cluster = report.cluster.split(" ");
  return make("div", { class: "tiles" },
    tile("predicted step", duration(step.step), `on ${cluster.slice(0, 2).join(" ")}`),
    tile("lower bound", duration(step.bound), `gap ${(100 * step.gap).toFixed(1)} %, set by: ${step.bound_by}`),
    tile("exposed communication", duration(step.exposed),
      `${percent(step.exposed, step.step)} of the step; ${exposed} of ${count(collectives.length, "collective")}`,
      step.exposed > 0),
    tile("compute", duration(step.compute), `${count(nodes.length, "node")}`),
    tile("peak memory", byteSize(step.peak_memory), "per rank, predicted"),
    tile("collectives", collectives.length.toLocaleString("en"), `${byteSize(total)} of payload per step`));
}

function facts(title, pairs) {
  const list = make("dl", { class: "facts" });
  for (const [name, value] of pairs) {
    list.append(make("dt", {}, name), make("dd", { title: value }, value));
  }
  return make("div", {}, make("h3", {}, title), list);
}

function totalsTable() {
  const table = make("table", {}, make("thead", {}, make("tr", {},
    make("th", { scope: "col" }, "kind"), make("th", { scope: "col" }, "phase"),
    make("th", { scope: "col", class: "number" }, "collectives"), make("th", { scope: "col", class: "number" }, "payload"))));
  const body = make("tbody");
  for (const each of report.totals) {
    body.append(make("tr", {}, make("td", {}, each.kind), make("td", {}, each.phase),
      make("td", { class: "number" }, each.count), make("td", { class: "number" }, bytesCell(each.bytes))));
  }
  table.append(body);
  return report.totals.length ? table : make("p", { class: "empty" }, "The step has no collectives.");
}

function showSummary() {
  const essential = ["torch", "world", "mesh", "step", "optimizer"];
  const first = report.header.filter(([name]) => essential.includes(name));
  const others = report.header.filter(([name]) => !essential.includes(name) && name !== "schema" && name !== "cluster");
  part("summary").append(
    tiles(),
    make("div", { class: "columns" },
      facts("What was compiled", [...first, ["cluster", report.cluster], ["fingerprint", report.fingerprint]]),
      facts("Configuration", others),
      make("div", {}, make("h3", {}, "Collectives by kind and phase"), totalsTable())));
}

function change(now, before) {
  const by = before === undefined ? 0 : now - before;
  return by ? ` (${by > 0 ? "+" : "−"}${Math.abs(by).toLocaleString("en")})` : "";
}

function showPasses() {
  if (!report.stages.length) {
    part("passes").append(make("p", { class: "empty" }, "There are no stages here, only the final graph."));
    return;
  }
  const body = make("tbody");
  report.stages.forEach((stage, i) => {
    const before = report.stages[i - 1] || {};
    body.append(make("tr", { class: stage.modified ? "" : "quiet" },
      make("td", { class: "number" }, i), make("td", {}, stage.name), make("td", {}, stage.modified ? "yes" : "no"),
      make("td", { class: "number" }, stage.nodes.toLocaleString("en"), make("small", {}, change(stage.nodes, before.nodes))),
      make("td", { class: "number" }, stage.collectives.toLocaleString("en"),
        make("small", {}, change(stage.collectives, before.collectives)))));
  });
  part("passes").append(make("table", {}, make("thead", {}, make("tr", {},
    make("th", { scope: "col", class: "number" }, "#"), make("th", { scope: "col" }, "pass"),
    make("th", { scope: "col" }, "modified"), make("th", { scope: "col", class: "number" }, "nodes"),
    make("th", { scope: "col", class: "number" }, "collectives"))), body));
}

function showNotes() {
  const topics = new Map();
  for (const note of report.notes) {
    if (!topics.has(note.topic)) topics.set(note.topic, []);
    topics.get(note.topic).push(note);
  }
  if (!topics.size) part("notes").append(make("p", { class: "empty" }, "The passes have noted nothing."));
  for (const [topic, notes] of topics) {
    const list = folded(notes, 12, (note) =>
      make("span", {}, make("b", {}, short(note.subject, 80)), ": ", note.reason), { class: "folded notes" });
    part("notes").append(make("details", topics.size === 1 ? { open: "" } : {},
      make("summary", {}, `${topic} (${notes.length})`), list));
  }
}
