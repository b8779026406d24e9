// Working with the timeline: the hint at a bar, selection, keys and mouse.

function barAt(x, y) {
  if (x < GUTTER) return null;
  const lane = timeline.lanes.find((each) => y >= each.top && y < each.top + each.rows * ROW);
  if (!lane) return null;
  const row = Math.floor((y - lane.top) / ROW);
  let best = null;
  let distance = 3; // Pixels: a thin bar need not be hit exactly.
  for (const bar of lane.bars) {
    if (bar.row !== row) continue;
    const away = Math.max(toX(bar.begin) - x, x - toX(bar.end), 0);
    if (away < distance) [best, distance] = [bar, away];
    if (away === 0 && bar.end > bar.begin) break;
  }
  return best && { lane, bar: best };
}

function hintLines({ lane, bar }) {
  const node = nodes[bar.node];
  const each = collectiveOf(bar);
  const lines = [make("b", {}, bar.label)];
  const say = (text, properties) => lines.push(make("div", properties, text));
  if (node && bar.kind === "compute") say(`${node.phase}, node ${bar.node}: ${node.name}, ${node.value}`);
  say(`${milliseconds(bar.begin)} – ${milliseconds(bar.end)} ms (${duration(bar.end - bar.begin)})`);
  if (each) {
    say(`${each.kind} ${each.op} on ${each.axes}, ${byteSize(each.bytes)} (${count(each.bytes, "byte")}), ${count(each.members.length, "member")}`);
    if (lane.isMeasured) say(`measured: the step stood still for ${duration(bar.waits[1] - bar.waits[0])}`);
    say(`predicted: ${duration(each.hidden)} hidden, ${duration(each.exposed)} exposed`);
    if (each.reason) say(`exposed: ${each.reason}`, { class: "why" });
  }
  return lines;
}

function showHint(found, x, y) {
  const hint = part("hint");
  hint.hidden = !found;
  timeline.canvas.style.cursor = found ? "pointer" : "grab";
  if (!found) return;
  hint.replaceChildren(...hintLines(found));
  const left = Math.min(x + 14, window.innerWidth - hint.offsetWidth - 8);
  const top = y + 18 + hint.offsetHeight > window.innerHeight ? y - hint.offsetHeight - 12 : y + 18;
  hint.style.left = `${Math.max(left, 4)}px`;
  hint.style.top = `${Math.max(top, 4)}px`;
}

// Keyboard and selection.

/** Outline a bar, move it into view if it is not there, and say what it is. */
function focusBar(found, withHint = true) {
  timeline.focused = found;
  const { bar } = found;
  if (bar.begin < timeline.begin || bar.end > timeline.end) {
    const span = Math.max(timeline.end - timeline.begin, 1.2 * (bar.end - bar.begin));
    const middle = (bar.begin + bar.end) / 2;
    show(middle - span / 2, middle + span / 2);
  }
  redraw();
  if (!withHint) return;
  const box = barBox(found.lane, bar);
  const canvas = timeline.canvas.getBoundingClientRect();
  showHint(found, canvas.left + Math.max(box.x, GUTTER), canvas.top + box.y + box.height - 10);
  part("reading").textContent = hintLines(found).map((line) => line.textContent).join("; ");
}

function nextBar(by) {
  const { focused, lanes } = timeline;
  const lane = focused ? focused.lane : lanes[0];
  const at = focused ? lane.bars.indexOf(focused.bar) + by : lane.bars.findIndex((bar) => bar.end >= timeline.begin);
  if (lane.bars[at]) focusBar({ lane, bar: lane.bars[at] });
}

/** To the bar of the next lane that is nearest in time. */
function nextLane(by) {
  const { focused, lanes } = timeline;
  const lane = lanes[focused ? lanes.indexOf(focused.lane) + by : 0];
  if (!lane || !lane.bars.length) return;
  const time = focused ? focused.bar.begin : timeline.begin;
  const away = (bar) => Math.max(bar.begin - time, time - bar.end, 0);
  focusBar({ lane, bar: lane.bars.reduce((best, bar) => (away(bar) < away(best) ? bar : best)) });
}

/** To the next exposed transfer of the prediction; around at the end. */
function nextExposed(by) {
  const found = timeline.lanes
    .filter((lane) => !lane.isMeasured)
    .flatMap((lane) => lane.bars.filter((bar) => bar.kind === "communication" && exposedPart(bar)).map((bar) => ({ lane, bar })))
    .sort((a, b) => a.bar.begin - b.bar.begin);
  if (!found.length) return;
  const at = timeline.focused ? found.findIndex(({ bar }) => bar === timeline.focused.bar) : -1;
  const next = at < 0 && by < 0 ? found.length - 1 : (at + by + found.length) % found.length;
  focusBar(found[next]);
}

function timelineKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const actions = {
    "+": () => zoom(1 / 1.5), "=": () => zoom(1 / 1.5), "-": () => zoom(1.5), 0: () => show(...timeline.whole),
    ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15),
    ArrowUp: () => nextLane(-1), ArrowDown: () => nextLane(1), "[": () => nextBar(-1), "]": () => nextBar(1),
    e: () => nextExposed(1), E: () => nextExposed(-1),
    Enter: () => timeline.focused && nodes[timeline.focused.bar.node] && select(timeline.focused.bar.node, "search"),
    Escape: () => showHint(null),
  };
  if (!actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
}

function selectInTimeline(position, from) {
  if (from === "timeline") return;
  const predicted = timeline.lanes.filter((lane) => !lane.isMeasured);
  let found = null;
  for (const lane of predicted) {
    const bar = lane.bars.find((each) => each.node === position);
    if (bar) found = { lane, bar };
  }
  timeline.focused = found;
  if (found && (from === "wire" || from === "table")) {
    const { begin, end } = found.bar;
    const margin = Math.max(end - begin, (timeline.whole[1] - timeline.whole[0]) / 200);
    show(begin - margin, end + margin);
  }
  if (from === "wire") part("timeline").scrollIntoView();
  if (found) focusBar(found, false);
  else redraw();
}

// Mouse.

function onWheel(event) {
  const sideways = event.shiftKey ? event.deltaY : event.deltaX;
  const active = document.activeElement === timeline.canvas || event.ctrlKey || event.shiftKey;
  if (Math.abs(sideways) > Math.abs(event.deltaY) || event.shiftKey) {
    event.preventDefault();
    pan(sideways / plotWidth());
  } else if (active) {
    event.preventDefault();
    zoom(Math.exp(event.deltaY * 0.0015), toTime(event.offsetX));
  }
}

function listenToMouse(canvas) {
  let held = null;
  canvas.addEventListener("wheel", onWheel, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    held = { x: event.offsetX, begin: timeline.begin, end: timeline.end, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (held && (held.moved || Math.abs(event.offsetX - held.x) > 3)) {
      held.moved = true;
      const by = ((event.offsetX - held.x) / plotWidth()) * (held.end - held.begin);
      showHint(null);
      show(held.begin - by, held.end - by);
    } else {
      showHint(barAt(event.offsetX, event.offsetY), event.clientX, event.clientY);
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    const found = held && !held.moved ? barAt(event.offsetX, event.offsetY) : null;
    held = null;
    if (!found) return;
    timeline.focused = found;
    redraw();
    if (nodes[found.bar.node]) select(found.bar.node, "timeline");
  });
  canvas.addEventListener("dblclick", (event) => {
    const found = barAt(event.offsetX, event.offsetY);
    if (found && nodes[found.bar.node]) select(found.bar.node, "search");
  });
  canvas.addEventListener("pointerleave", () => showHint(null));
  canvas.addEventListener("blur", () => showHint(null));
}
