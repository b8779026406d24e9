// The table of collectives: sortable, with members folded.

const ROWS_SHOWN = 200;

const COLUMNS = [
  { title: "#", number: true, key: (c) => c.issued, hint: "issue order" },
  { title: "name", key: (c) => c.name },
  { title: "kind", key: (c) => `${c.kind} ${c.op} ${c.dtype}` },
  { title: "phase", key: (c) => PHASES.indexOf(c.phase) },
  { title: "group", key: (c) => `${c.axes} ${c.ranks}`, hint: "mesh axes, and ranks of the group of this rank" },
  { title: "payload", number: true, key: (c) => c.bytes },
  { title: "members", key: (c) => c.members.length },
  { title: "issued at", number: true, key: (c) => c.issued_at, hint: "position of the node in the graph; ×2: in two pieces" },
  { title: "waited at", number: true, key: (c) => c.waited_at, hint: "position of the node in the graph" },
  { title: "on the wire, ms", number: true, key: (c) => c.begin, hint: "since the step began, predicted" },
  { title: "hidden, ms", number: true, key: (c) => c.hidden },
  { title: "exposed, ms", number: true, key: (c) => c.exposed },
  { title: "why it is exposed", key: (c) => c.reason },
];

const collectiveTable = { column: -1, down: false, all: false, body: null, rows: new Map() };

function compare(a, b) {
  return typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
}

function sortedCollectives() {
  const found = collectives.map((each, i) => [each, i]);
  if (collectiveTable.column > 0) {
    const key = COLUMNS[collectiveTable.column].key;
    found.sort(([a, i], [b, j]) => compare(key(a), key(b)) || i - j);
  }
  return collectiveTable.down ? found.reverse() : found;
}

function memberCell(each, row) {
  if (each.members.length === 1) return make("td", {}, short(each.members[0], 24));
  const toggle = link(count(each.members.length, "member"), each.members.slice(0, 20).join("\n"), () => {
    if (row.nextSibling && row.nextSibling.classList.contains("members")) {
      row.nextSibling.remove();
      toggle.setAttribute("aria-expanded", "false");
      return;
    }
    row.after(make("tr", { class: "members" }, make("td"),
      make("td", { colspan: COLUMNS.length - 1 }, folded(each.members, 100, (name) => name))));
    toggle.setAttribute("aria-expanded", "true");
  }, { "aria-expanded": "false" });
  return make("td", {}, toggle);
}

function waitedCell(each) {
  if (!each.next_step) return make("td", { class: "number" }, each.waited_at);
  return make("td", { class: "number", title: `before ${each.next_step} of the next step` }, "next step");
}

function collectiveRow(each, number) {
  const row = make("tr", { class: each.exposed > 0 ? "exposed" : "" });
  const cell = (...children) => make("td", { class: "number" }, ...children);
  row.append(
    cell(number),
    make("td", {}, link(shorten(each.name, 28), `${each.name}: show it in the graph`, () => select(each.node, "table"))),
    make("td", { title: each.dtype }, `${each.kind} ${each.op}`,
      ...(each.fusion_id === null ? [] : [make("small", {}, ` id ${each.fusion_id}`)])),
    make("td", {}, each.phase),
    make("td", {}, `${each.axes}(${each.size}) `, short(each.ranks, 16, { class: "quiet" })),
    cell(bytesCell(each.bytes)),
    memberCell(each, row),
    cell(each.issued_at, ...(each.pieces > 1 ? [make("small", { title: `in ${each.pieces} pieces` }, ` ×${each.pieces}`)] : [])),
    waitedCell(each),
    cell(link(`${milliseconds(each.begin)} – ${milliseconds(each.end)}`, "show it in the timeline",
      () => select(each.node, "wire"))),
    cell(milliseconds(each.hidden)),
    make("td", { class: "number strong" }, milliseconds(each.exposed)),
    make("td", { class: "why" }, each.reason));
  collectiveTable.rows.set(each.node, row);
  return row;
}

function fillCollectives() {
  const found = sortedCollectives();
  const shown = collectiveTable.all ? found : found.slice(0, ROWS_SHOWN);
  collectiveTable.rows.clear();
  collectiveTable.body.replaceChildren(...shown.map(([each, number]) => collectiveRow(each, number)));
  if (shown.length < found.length) {
    const more = link(`show all ${found.length} collectives`, "", () => {
      collectiveTable.all = true;
      fillCollectives();
    });
    collectiveTable.body.append(make("tr", {}, make("td", { colspan: COLUMNS.length }, more)));
  }
  markCollective(selected);
}

function markCollective(position) {
  for (const row of collectiveTable.rows.values()) row.classList.remove("selected");
  const row = collectiveTable.rows.get(position);
  if (row) row.classList.add("selected");
}

function sortBy(column, heads) {
  collectiveTable.down = collectiveTable.column === column ? !collectiveTable.down : COLUMNS[column].number && column > 0;
  collectiveTable.column = column;
  heads.forEach((head, i) => head.setAttribute("aria-sort",
    i !== column ? "none" : collectiveTable.down ? "descending" : "ascending"));
  fillCollectives();
}

function showCollectives() {
  if (!collectives.length) {
    part("collectives").append(make("p", { class: "empty" }, "The step has no collectives."));
    return;
  }
  const heads = COLUMNS.map((column, i) => make("th",
    { scope: "col", class: column.number ? "number" : "", "aria-sort": "none" },
    link(column.title, column.hint ? `${column.hint}; click to sort` : "click to sort", () => sortBy(i, heads))));
  collectiveTable.body = make("tbody");
  part("collectives").append(make("div", { class: "scroll tall" },
    make("table", { class: "wide" }, make("thead", {}, make("tr", {}, ...heads)), collectiveTable.body)));
  fillCollectives();
  onSelect.push(markCollective);
}
