// The timeline: predicted lanes and, below them on the same scale, the steps that were measured.

const GUTTER = 132; // Pixels for the names of lanes,
const AXIS = 26; // for the time axis,
const ROW = 24; // for one row of bars,
const GAP = 8; // between lanes,
const RIGHT = 10; // and on the right.
const NARROWEST = 1e-9; // Seconds; nobody can zoom in further.

const timeline = {
  canvas: null, context: null, lanes: [], begin: 0, end: 1, whole: [0, 1], width: 0,
  focused: null, // {lane, bar} by keyboard or selection
  measured: -1, colours: {}, hatch: null, drawing: false,
};

/** Bars in as few rows as keep them from overlapping. */
function placed(lane, isMeasured) {
  const ends = [];
  const bars = lane.bars.map((bar) => {
    let row = ends.findIndex((end) => end <= bar.begin);
    if (row < 0) row = ends.length;
    ends[row] = bar.end;
    return { ...bar, row };
  });
  return { title: lane.title, bars, rows: Math.max(ends.length, 1), isMeasured, top: 0 };
}

function placeLanes() {
  const measured = report.measured[timeline.measured];
  timeline.lanes = report.lanes.map((lane) => placed(lane, false));
  if (measured) timeline.lanes.push(placed(measured, true));
  let top = AXIS;
  for (const lane of timeline.lanes) {
    if (lane.isMeasured) top += GAP;
    lane.top = top;
    top += lane.rows * ROW + GAP;
  }
  timeline.canvas.style.height = `${top}px`;
  const bars = timeline.lanes.flatMap((lane) => lane.bars);
  const begin = bars.reduce((least, bar) => Math.min(least, bar.begin), 0);
  const end = bars.reduce((most, bar) => Math.max(most, bar.end), report.prediction.step);
  timeline.whole = [begin, end > begin ? end : begin + 1e-3];
}

// Which collective a bar speaks of, and from when to when the step stood still for it.

function collectiveOf(bar) {
  if (bar.kind === "communication" || bar.kind === "issue") return collectiveAt.get(bar.node);
  if (bar.kind === "wait") return collectiveAt.get(nodes[bar.node].inputs[0]);
  return undefined;
}

function exposedPart(bar) {
  if (bar.kind === "wait") return [bar.begin, bar.end];
  if (!bar.waits) return null;
  const begin = Math.max(bar.begin, bar.waits[0]);
  const end = Math.min(bar.end, bar.waits[1]);
  return end > begin ? [begin, end] : null;
}

// Scale.

function plotWidth() {
  return Math.max(timeline.width - GUTTER - RIGHT, 1);
}

function toX(time) {
  return GUTTER + ((time - timeline.begin) / (timeline.end - timeline.begin)) * plotWidth();
}

function toTime(x) {
  return timeline.begin + ((x - GUTTER) / plotWidth()) * (timeline.end - timeline.begin);
}

/** Show from `begin` to `end`, as far as there is something. */
function show(begin, end) {
  const [first, last] = timeline.whole;
  const span = Math.min(Math.max(end - begin, NARROWEST), last - first);
  timeline.begin = Math.min(Math.max(begin, first), last - span);
  timeline.end = timeline.begin + span;
  redraw();
}

function zoom(factor, at = (timeline.begin + timeline.end) / 2) {
  show(at - (at - timeline.begin) * factor, at + (timeline.end - at) * factor);
}

function pan(part) {
  const by = part * (timeline.end - timeline.begin);
  show(timeline.begin + by, timeline.end + by);
}

// The frame around it.

function legend() {
  const keys = [["forward", "forward"], ["backward", "backward"], ["update", "update"], ["issue", "issuing a collective"],
    ["sent", "on the wire, hidden"], ["exposed", "exposed: the step stands still"]];
  return make("span", { class: "legend" }, ...keys.map(([name, text]) =>
    make("span", {}, make("i", { class: `key ${name}` }), text)));
}

function measuredChoice() {
  if (!report.measured.length) return [];
  timeline.measured = report.measured.length - 1;
  const choice = make("select", { "aria-label": "measured step", change: () => {
    timeline.measured = Number(choice.value);
    timeline.focused = null;
    placeLanes();
    show(...timeline.whole);
  } }, ...report.measured.map((lane, i) => make("option", { value: i }, lane.title)));
  choice.value = timeline.measured;
  return [choice];
}

function showTimeline() {
  if (!report.lanes.some((lane) => lane.bars.length)) {
    part("timeline").append(make("p", { class: "empty" }, "Nothing runs in this step."));
    return;
  }
  const button = (text, title, action) => make("button", { type: "button", title, click: action }, text);
  const canvas = make("canvas", { id: "lanes", tabindex: "0", role: "img", keydown: timelineKey,
    "aria-label": "Timeline of the step: compute, and communication by group", "aria-describedby": "timeline-keys" });
  timeline.canvas = canvas;
  timeline.context = canvas.getContext("2d");
  part("timeline").append(
    make("div", { class: "tools" }, legend(), make("span", { class: "buttons" }, ...measuredChoice(),
      button("−", "zoom out (-)", () => zoom(1.5)), button("+", "zoom in (+)", () => zoom(1 / 1.5)),
      button("◂", "earlier (←)", () => pan(-0.25)), button("▸", "later (→)", () => pan(0.25)),
      button("whole step", "0", () => show(...timeline.whole)),
      button("next exposed", "e, back with Shift", () => nextExposed(1)))),
    canvas,
    make("p", { id: "timeline-keys", class: "quiet" },
      "Drag to move; click and use the wheel, or Ctrl + wheel, to zoom; double click or Enter shows a node in the graph. ",
      "Keys: + − 0 ← → , [ ] bar, ↑ ↓ lane, e exposed.",
      report.measured.length ? " Measured times are put where the prediction has the first issue." : ""),
    make("p", { id: "reading", class: "unseen", "aria-live": "polite" }));
  readColours();
  placeLanes();
  [timeline.begin, timeline.end] = timeline.whole;
  listenToMouse(canvas);
  onSelect.push(selectInTimeline);
  new ResizeObserver(redraw).observe(canvas);
  for (const medium of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(medium).addEventListener("change", () => {
      readColours();
      draw();
    });
  }
  draw();
}
