// Drawing the timeline on its canvas.

function redraw() {
  if (timeline.drawing) return;
  timeline.drawing = true;
  requestAnimationFrame(() => {
    timeline.drawing = false;
    draw();
  });
}

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["text", "muted", "line", "panel", "forward", "backward", "update", "input", "sent", "issue", "exposed", "on-bar", "focus"]) {
    timeline.colours[name] = style.getPropertyValue(`--${name}`).trim();
  }
  timeline.hatch = hatchPattern(timeline.colours.exposed, timeline.colours.panel);
}

/** Diagonal stripes, so that exposed time can be told without its colour. */
function hatchPattern(colour, ground) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const context = tile.getContext("2d");
  context.fillStyle = ground;
  context.fillRect(0, 0, 8, 8);
  context.strokeStyle = colour;
  context.lineWidth = 3;
  for (const shift of [-8, 0, 8]) {
    context.beginPath();
    context.moveTo(shift - 2, 10);
    context.lineTo(shift + 10, -2);
    context.stroke();
  }
  return timeline.context.createPattern(tile, "repeat");
}

function draw() {
  const { canvas, context } = timeline;
  const scale = window.devicePixelRatio || 1;
  timeline.width = canvas.clientWidth;
  canvas.width = Math.round(timeline.width * scale);
  canvas.height = Math.round(canvas.clientHeight * scale);
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  drawAxis();
  for (const lane of timeline.lanes) drawLane(lane);
  drawStepEnd();
}

function drawAxis() {
  const { context, colours } = timeline;
  const span = timeline.end - timeline.begin;
  const step = niceStep((span * 90) / plotWidth());
  const [unit, name] = span >= 1 ? [1, "s"] : span >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  const digits = Math.max(0, -Math.floor(Math.log10(step * unit) + 1e-9));
  context.textAlign = "center";
  for (let i = Math.ceil(timeline.begin / step); i * step <= timeline.end; i += 1) {
    const x = toX(i * step);
    context.fillStyle = colours.line;
    context.fillRect(x, AXIS - 6, 1, canvasHeight() - AXIS);
    context.fillStyle = colours.muted;
    if (x < timeline.width - 24) context.fillText(`${(i * step * unit).toFixed(digits)} ${name}`, x, AXIS / 2 - 2);
  }
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
}

function canvasHeight() {
  return timeline.canvas.clientHeight;
}

function drawLane(lane) {
  const { context, colours } = timeline;
  context.fillStyle = colours.text;
  context.textAlign = "left";
  context.fillText(shorten(lane.title, 20), 4, lane.top + ROW / 2);
  context.save();
  context.beginPath();
  context.rect(GUTTER, lane.top - 3, plotWidth() + RIGHT, lane.rows * ROW + 6);
  context.clip();
  context.fillStyle = colours.line;
  context.globalAlpha = 0.35;
  context.fillRect(GUTTER, lane.top, plotWidth(), lane.rows * ROW - 2);
  context.globalAlpha = 1;
  for (const bar of lane.bars) drawBar(lane, bar);
  if (timeline.focused && timeline.focused.lane === lane) outline(lane, timeline.focused.bar);
  context.restore();
}

function barBox(lane, bar) {
  const x = toX(bar.begin);
  return { x, y: lane.top + bar.row * ROW, width: Math.max(toX(bar.end) - x, 0.6), height: ROW - 2 };
}

function drawBar(lane, bar) {
  if (bar.end < timeline.begin || bar.begin > timeline.end) return;
  const { context, colours } = timeline;
  const { x, y, width, height } = barBox(lane, bar);
  if (bar.kind === "compute") context.fillStyle = colours[nodes[bar.node].phase];
  else context.fillStyle = bar.kind === "issue" ? colours.issue : colours.sent;
  // A line of the ground between neighbours, where there is room for it.
  if (bar.kind !== "wait") context.fillRect(x, y, width > 3 ? width - 0.7 : width, height);
  const exposed = exposedPart(bar);
  if (exposed) drawExposed(exposed, y, height);
  drawLabel(bar, exposed, x, y, width, height);
}

function drawExposed([begin, end], y, height) {
  const { context, colours, hatch } = timeline;
  const x = toX(begin);
  const width = Math.max(toX(end) - x, 1);
  context.fillStyle = width > 3 ? hatch : colours.exposed;
  context.fillRect(x, y, width, height);
  if (width > 3) {
    context.strokeStyle = colours.exposed;
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
  }
}

function drawLabel(bar, exposed, x, y, width, height) {
  const left = Math.max(x, GUTTER) + 5;
  const room = Math.floor((Math.min(x + width, timeline.width - RIGHT) - left - 5) / 6.4);
  if (room < 5) return;
  const { context, colours } = timeline;
  const text = clip(bar.label, room);
  context.textAlign = "left";
  if (exposed && toX(exposed[0]) < left + 6.4 * text.length) {
    // Text on stripes cannot be read.
    context.fillStyle = colours.panel;
    context.fillRect(left - 3, y + 3, context.measureText(text).width + 6, height - 6);
    context.fillStyle = colours.text;
  } else {
    context.fillStyle = colours["on-bar"];
  }
  context.fillText(text, left, y + height / 2 + 0.5);
}

function outline(lane, bar) {
  const { context, colours } = timeline;
  const { x, y, width, height } = barBox(lane, bar);
  context.strokeStyle = colours.focus;
  context.lineWidth = 2;
  context.strokeRect(x - 1, y - 1, Math.max(width, 2) + 2, height + 2);
}

function drawStepEnd() {
  const { context, colours } = timeline;
  const x = toX(report.prediction.step);
  if (x < GUTTER || x > timeline.width) return;
  context.fillStyle = colours.text;
  context.fillRect(Math.min(x, timeline.width - 1.5), AXIS - 8, 1.5, canvasHeight());
}
