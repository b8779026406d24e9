// Collectives before and after fusion, side by side: each final one beside those that it stands for.

const GROUPS_SHOWN = 60;

function fusionBar(bytes, largest) {
  const bar = make("span", { class: "bar" });
  bar.style.width = `${Math.max(largest ? (100 * bytes) / largest : 0, 0.5)}%`;
  return bar;
}

function unfusedItem(number) {
  const each = report.fusion.before[number];
  const name = each.members.join(", ");
  return make("span", { class: "pair" }, short(name, 56), make("span", { class: "number" }, bytesCell(each.bytes)));
}

function fusionGroup(each, parts, largest) {
  const known = parts.length > 0;
  const name = link(shorten(each.name, 48), `${each.name}: show it in the graph`, () => select(each.node, "fusion"));
  const after = make("span", { class: "pair" }, name, make("span", { class: "number" }, bytesCell(each.bytes)));
  if (parts.length === 1) {
    return make("div", { class: "fused" }, unfusedItem(parts[0]), make("div", { class: "arrow", "aria-hidden": "true" }, "→"), after);
  }
  return make("div", { class: "fused" },
    make("div", {}, known ? folded(parts, 6, unfusedItem) : make("p", { class: "empty" }, "nothing before it: a pass has made it")),
    make("div", { class: "arrow", "aria-hidden": "true" }, "⇒"),
    make("div", {}, after,
      make("span", { class: "quiet" }, `${each.kind} ${each.op} on ${each.axes}(${each.size}), ${count(each.members.length, "member")}`),
      fusionBar(each.bytes, largest)));
}

function fusionTotals() {
  const { before, stage } = report.fusion;
  const sizes = before.map((each) => each.bytes);
  const size = sizes.includes(null) ? "?" : byteSize(sum(sizes));
  const after = byteSize(sum(collectives.map((each) => each.bytes)));
  const source = stage ? `after the pass ${stage}` : "derived from the members";
  return make("p", { id: "fusion-totals" },
    make("strong", {}, `${count(before.length, "collective")} → ${collectives.length}`),
    ` before (${source}): ${size}; after: ${after}`);
}

function showFusion() {
  const box = part("fusion");
  const { before, parts, gone } = report.fusion;
  if (!collectives.length && !before.length) {
    box.append(make("p", { class: "empty" }, "The step has no collectives."));
    return;
  }
  const largest = Math.max(0, ...collectives.map((each) => each.bytes));
  const list = make("div", { class: "tall" });
  const add = (begin, end) =>
    list.append(...collectives.slice(begin, end).map((each, i) => fusionGroup(each, parts[begin + i], largest)));
  list.append(make("div", { class: "fused heads" },
    make("b", {}, "before fusion"), make("span"), make("b", {}, "in the final graph")));
  box.append(fusionTotals(), list);
  add(0, GROUPS_SHOWN);
  if (collectives.length > GROUPS_SHOWN) {
    const more = link(`show all ${collectives.length} collectives`, "", () => {
      more.remove();
      add(GROUPS_SHOWN, collectives.length);
    });
    box.append(more);
  }
  if (gone.length) {
    box.append(make("details", {}, make("summary", {}, `${count(gone.length, "collective")} that no final one stands for`),
      folded(gone, 50, unfusedItem)));
  }
}
