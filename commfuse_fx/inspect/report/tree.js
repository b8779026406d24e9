// The graph as a tree: phase, module path, nodes. Rows are made when their group is opened.

const FOLD_ABOVE = 200; // More children than that are put into ranges,
const FOLD_SIZE = 100; // of this many each.

const tree = { element: null, roots: [], groupOf: new Map(), rows: new Map(), details: null };

function newGroup(title, parent) {
  return { title, parent, children: [], named: new Map(), nodes: 0, collectives: 0, seconds: 0, sent: 0, open: false };
}

function countNode(group, node, position) {
  for (let each = group; each; each = each.parent) {
    each.nodes += 1;
    each.collectives += collectiveAt.has(position) ? 1 : 0;
    each.seconds += node.seconds;
    each.sent += node.sent;
  }
}

function buildTree() {
  const roots = new Map(PHASES.map((phase) => [phase, newGroup(phase, null)]));
  nodes.forEach((node, position) => {
    let group = roots.get(node.phase);
    for (const step of node.path) {
      if (!group.named.has(step)) {
        const child = newGroup(step, group);
        group.named.set(step, child);
        group.children.push(child);
      }
      group = group.named.get(step);
    }
    group.children.push(position);
    countNode(group, node, position);
  });
  const found = [...roots.values()].filter((group) => group.nodes);
  found.forEach(tidyGroup);
  return found;
}

/** Join chains of groups that hold nothing but the next one, and put long lists of children into ranges. */
function tidyGroup(group) {
  while (group.parent && group.children.length === 1 && typeof group.children[0] === "object") {
    const [only] = group.children;
    group.title = `${group.title}.${only.title}`;
    group.children = only.children;
  }
  for (const child of group.children) {
    if (typeof child === "object") {
      child.parent = group;
      tidyGroup(child);
    }
  }
  if (group.children.length > FOLD_ABOVE) group.children = ranges(group);
  for (const child of group.children) {
    if (typeof child === "number") tree.groupOf.set(child, group);
  }
}

function ranges(group) {
  const found = [];
  for (let begin = 0; begin < group.children.length; begin += FOLD_SIZE) {
    const children = group.children.slice(begin, begin + FOLD_SIZE);
    const range = newGroup(`${childTitle(children[0])} … ${childTitle(children[children.length - 1])}`, group);
    range.children = children;
    for (const child of children) {
      const isGroup = typeof child === "object";
      if (isGroup) child.parent = range;
      else tree.groupOf.set(child, range);
      range.nodes += isGroup ? child.nodes : 1;
      range.collectives += isGroup ? child.collectives : Number(collectiveAt.has(child));
      range.seconds += isGroup ? child.seconds : nodes[child].seconds;
      range.sent += isGroup ? child.sent : nodes[child].sent;
    }
    found.push(range);
  }
  return found;
}

function childTitle(child) {
  return shorten(typeof child === "object" ? child.title : leafName(nodes[child]), 40);
}

function depthOf(group) {
  let depth = 1;
  for (let each = group.parent; each; each = each.parent) depth += 1;
  return depth;
}

function cells(title, op, value, seconds, sent, inputs, users) {
  const number = (content) => make("span", { class: "number" }, content);
  return [title, op, value, number(seconds ? milliseconds(seconds) : ""), number(sent ? bytesCell(sent) : ""), inputs, users];
}

function treeRow(className, level, ...content) {
  const row = make("div", { class: `row ${className}`, role: "treeitem", tabindex: "-1", "aria-level": level }, ...content);
  row.style.setProperty("--level", level - 1);
  return row;
}

function groupRow(group) {
  const size = [count(group.nodes, "node")];
  if (group.collectives) size.push(count(group.collectives, "collective"));
  const title = make("span", { class: "title", title: group.title }, make("span", { class: "twisty" }), group.title);
  const row = treeRow(`group ${group.parent ? "" : "phase"}`, depthOf(group),
    ...cells(title, make("span", { class: "quiet wide" }, size.join(", ")), "", group.seconds, group.sent, "", ""));
  row.setAttribute("aria-expanded", "false");
  row.addEventListener("click", () => toggleGroup(group));
  const box = make("div", { role: "group", hidden: "" });
  tree.rows.set(group, { row, box });
  return [row, box];
}

function nodeLink(position, text, properties = {}) {
  return link(text, nodes[position].name, (event) => {
    event.stopPropagation();
    select(position, "graph");
  }, properties);
}

/** The first few of some nodes. Not reached by Tab, as the details of the row have the same links. */
function linkList(positions, shown) {
  const box = make("span", { class: "links" });
  box.append(...positions.slice(0, shown).map((each) => nodeLink(each, leafName(nodes[each]), { tabindex: "-1" })));
  if (positions.length > shown) box.append(make("small", {}, `+${positions.length - shown}`));
  return box;
}

function nodeRow(position, level) {
  const node = nodes[position];
  const title = make("span", { class: "title", title: node.name },
    make("small", { class: "position" }, position), shorten(leafName(node), 46));
  const row = treeRow(collectiveAt.has(position) ? "leaf collective" : "leaf", level,
    ...cells(title, short(node.op, 24), make("span", { title: node.value }, node.value),
      node.seconds, node.sent, linkList(node.inputs, 2), linkList(users[position], 1)));
  row.addEventListener("click", () => select(position, "graph"));
  tree.rows.set(position, { row });
  return row;
}

function toggleGroup(group, open = !group.open) {
  const { row, box } = tree.rows.get(group);
  if (open && !box.childElementCount) {
    const level = depthOf(group) + 1;
    for (const child of group.children) {
      box.append(...(typeof child === "object" ? groupRow(child) : [nodeRow(child, level)]));
    }
  }
  group.open = open;
  box.hidden = !open;
  row.setAttribute("aria-expanded", String(open));
}

function detailList(title, positions) {
  if (!positions.length) return [];
  return [make("dt", {}, `${title} (${positions.length})`), make("dd", {}, folded(positions, 12, (each) => nodeLink(each, shorten(nodes[each].name, 70))))];
}

function nodeDetails(position) {
  const node = nodes[position];
  const each = collectiveAt.get(position);
  const list = make("dl", { class: "facts" });
  const fact = (name, value) => list.append(make("dt", {}, name), make("dd", {}, value));
  fact("name", node.name);
  fact("op", node.op);
  fact("value", node.value);
  if (node.seconds) fact("compute", duration(node.seconds));
  if (each) {
    fact("collective", `${each.kind} ${each.op} ${each.dtype} on ${each.axes}, ranks ${each.ranks}; ${count(each.bytes, "byte")}`);
    fact("predicted", `${duration(each.hidden)} hidden, ${duration(each.exposed)} exposed${each.reason ? `: ${each.reason}` : ""}`);
    list.append(make("dt", {}, `members (${each.members.length})`), make("dd", {}, folded(each.members, 12, (name) => name)));
  }
  list.append(...detailList("inputs", node.inputs), ...detailList("memory written by", each ? each.after : []),
    ...detailList("users", users[position]));
  const line = make("details", {}, make("summary", {}, "line of the canonical text"), make("pre", {}, node.line));
  return make("div", { class: "details" }, list, ...(node.line ? [line] : []));
}

/** Open the way to a node, show its details below it, and go there. */
function revealNode(position, from) {
  const way = [];
  for (let group = tree.groupOf.get(position); group; group = group.parent) way.unshift(group);
  way.forEach((group) => toggleGroup(group, true));
  if (tree.details) tree.details.remove();
  for (const row of tree.element.querySelectorAll(".row.selected")) row.classList.remove("selected");
  const { row } = tree.rows.get(position);
  row.classList.add("selected");
  tree.details = nodeDetails(position);
  row.after(tree.details);
  focusRow(row, from === "graph" || from === "table" || from === "fusion");
  if (from !== "wire" && from !== "timeline") row.scrollIntoView({ block: "center" });
}

function focusRow(row, really = true) {
  for (const other of tree.element.querySelectorAll('.row[tabindex="0"]')) other.tabIndex = -1;
  row.tabIndex = 0;
  if (really) row.focus({ preventScroll: true });
}

function treeKey(event) {
  const row = event.target.closest(".row");
  if (!row || event.target !== row || event.altKey || event.ctrlKey || event.metaKey) return;
  const rows = [...tree.element.querySelectorAll(".row")].filter((each) => each.offsetParent);
  const at = rows.indexOf(row);
  const open = row.getAttribute("aria-expanded");
  const level = Number(row.ariaLevel);
  const parent = rows.slice(0, at).reverse().find((each) => Number(each.ariaLevel) < level);
  const go = (target) => {
    if (!target) return;
    focusRow(target);
    target.scrollIntoView({ block: "nearest" });
  };
  const actions = {
    ArrowDown: () => go(rows[at + 1]),
    ArrowUp: () => go(rows[at - 1]),
    ArrowRight: () => (open === "false" ? row.click() : go(rows[at + 1])),
    ArrowLeft: () => (open === "true" ? row.click() : go(parent)),
    Home: () => go(rows[0]),
    End: () => go(rows[rows.length - 1]),
    Enter: () => row.click(),
    " ": () => row.click(),
  };
  if (!actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
}

function collapseAll() {
  for (const [group, made] of tree.rows) if (made.box && group.open) toggleGroup(group, false);
}

function showTree() {
  if (!nodes.length) {
    part("graph").append(make("p", { class: "empty" }, "The graph is empty."));
    return;
  }
  tree.roots = buildTree();
  tree.element = make("div", { id: "tree", role: "tree", "aria-label": "Graph by phase and module", keydown: treeKey });
  const heads = cells(make("span", {}, "name"), make("span", {}, "op"), make("span", {}, "value"), 0, 0,
    make("span", {}, "inputs"), make("span", {}, "users"));
  heads[3].textContent = "compute, ms";
  heads[4].textContent = "sent";
  tree.element.append(make("div", { class: "row heads", "aria-hidden": "true" }, ...heads));
  for (const group of tree.roots) tree.element.append(...groupRow(group));
  tree.element.querySelector(".row.group").tabIndex = 0;
  part("graph").append(
    make("p", { class: "tools" }, count(nodes.length, "node"), " ", make("button", { type: "button", click: collapseAll }, "collapse all")),
    make("div", { class: "scroll" }, tree.element));
  onSelect.push(revealNode);
}
