// How parameters and results of modules lie on the mesh: a row for each, a column for each axis, coloured by placement.

const LAYOUT = { row: 22, name: 400, value: 190, cell: 92, bytes: 190, head: 40, text: 56, shown: 150 };

const PLACEMENTS = [
  ["R", "whole", "R: every rank holds the whole"],
  ["S(0)", "first", "S(0): in parts along dimension 0"],
  ["S(1)", "second", "S(1): along dimension 1"],
  ["S(2)", "later", "S(2), ...: along a later one"],
  ["P", "summand", "P: every rank holds a summand"],
  ["own", "own", "own: each rank has a value of its own part of the batch"],
];

/** An element of a picture. */
function vector(tag, properties = {}, ...children) {
  const element = document.createElementNS(part("ink").namespaceURI, tag);
  for (const [name, value] of Object.entries(properties)) element.setAttribute(name, value);
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

function placementClass(cell) {
  const known = PLACEMENTS.find(([name]) => name === cell.replace(/;\d+/, ""));
  return known ? known[1] : cell.startsWith("S") ? "later" : "whole";
}

function spoken(cell, axis) {
  const [name, size] = axis;
  const part = /^S\((\d+)(?:;(\d+))?\)$/.exec(cell);
  if (part) return `${cell} on ${name}: dimension ${part[1]}${part[2] ? `, in each of ${part[2]} blocks,` : ""} in ${size} parts`;
  if (cell === "P") return `P on ${name}: each of ${size} ranks holds a summand`;
  return cell === "own" ? `own on ${name}: each of ${size} parts of the batch has another value` : `R on ${name}: whole`;
}

function layoutRow(row, place, axes) {
  const top = LAYOUT.head + place * LAYOUT.row;
  const middle = top + LAYOUT.row / 2 + 4;
  const left = LAYOUT.name + LAYOUT.value;
  const group = vector("g", { class: `layout ${row.kind}` },
    vector("title", {}, [
      `${row.name}: ${row.kind === "result" ? "result of the module, " : ""}${row.value}`,
      ...axes.map((axis, i) => spoken(row.cells[i], axis)),
      `${byteSize(row.nbytes)} whole, ${byteSize(row.on_rank)} on a rank${row.count > 1 ? `; ${row.count} of these` : ""}`,
    ].join("\n")),
    vector("rect", { class: "ground", x: 0, y: top, width: left + axes.length * LAYOUT.cell + LAYOUT.bytes, height: LAYOUT.row }),
    vector("text", { x: row.kind === "result" ? 22 : 6, y: middle }, shorten(`${row.kind === "result" ? "→ " : ""}${row.name}`, LAYOUT.text)),
    vector("text", { x: LAYOUT.name, y: middle, class: "muted" }, shorten(row.value, 26)));
  row.cells.forEach((cell, i) => {
    const x = left + i * LAYOUT.cell;
    group.append(
      vector("rect", { class: `cell ${placementClass(cell)}`, x: x + 1, y: top + 1, width: LAYOUT.cell - 2, height: LAYOUT.row - 2, rx: 3 }),
      vector("text", { x: x + LAYOUT.cell / 2, y: middle, "text-anchor": "middle", class: "placed" }, cell));
  });
  const held = row.on_rank === row.nbytes ? byteSize(row.nbytes) : `${byteSize(row.on_rank)} of ${byteSize(row.nbytes)}`;
  group.append(vector("text", { x: left + axes.length * LAYOUT.cell + LAYOUT.bytes - 6, y: middle, "text-anchor": "end" },
    row.count > 1 ? `${row.count} × ${held}` : held));
  return group;
}

function layoutImage(rows, axes) {
  const left = LAYOUT.name + LAYOUT.value;
  const width = left + axes.length * LAYOUT.cell + LAYOUT.bytes;
  const height = LAYOUT.head + rows.length * LAYOUT.row;
  const image = vector("svg", {
    id: "layout-image", width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `Layouts of ${rows.length} rows on the axes ${axes.map(([name]) => name).join(", ")}`,
  });
  const head = (x, text, anchor = "start") => vector("text", { x, y: 26, class: "head", "text-anchor": anchor }, text);
  image.append(head(6, "parameter, → result of a module"), head(LAYOUT.name, "whole tensor"),
    ...axes.map(([name, size], i) => head(left + (i + 0.5) * LAYOUT.cell, shorten(`${name} (${size})`, 12), "middle")),
    head(width - 6, "on a rank", "end"), ...rows.map((row, place) => layoutRow(row, place, axes)));
  return image;
}

function layoutLegend(rows) {
  const used = new Set(rows.flatMap((row) => row.cells.map(placementClass)));
  return make("p", { class: "legend", id: "layout-legend" }, ...PLACEMENTS.filter(([, kind]) => used.has(kind)).map(([, kind, text]) =>
    make("span", {}, make("i", { class: `key ${kind}` }), text)));
}

function showLayouts() {
  const picture = report.layouts;
  if (!picture) {
    part("layouts").remove();
    document.querySelector('nav a[href="#layouts"]').remove();
    return;
  }
  const { axes, rows } = picture;
  const box = make("div", { class: "scroll" }, layoutImage(rows.slice(0, LAYOUT.shown), axes));
  part("layouts").append(layoutLegend(rows), box);
  if (rows.length > LAYOUT.shown) {
    const more = link(`show all ${rows.length} rows`, "", () => {
      more.remove();
      box.replaceChildren(layoutImage(rows, axes));
    });
    part("layouts").append(more);
  }
}
