"use strict";

// The data, and what every part of the page needs: the graph's index, elements, numbers as text.
// Text from the data goes into the page as text only, never as markup.

const report = JSON.parse(document.getElementById("data").textContent);
const nodes = report.nodes;
const collectives = report.collectives;
const PHASES = ["input", "forward", "backward", "update"];

// Positions of the nodes that take each node's value.
const users = nodes.map(() => []);
nodes.forEach((node, position) => node.inputs.forEach((input) => users[input].push(position)));

// Position of a node -> the collective that it starts.
const collectiveAt = new Map(collectives.map((each) => [each.node, each]));

function part(name) {
  return document.getElementById(name);
}

/** An element with properties (`class`, `title`, `on...` and attributes) and children: elements or text. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== undefined && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

/** A control that looks like a link. */
function link(text, title, action, properties = {}) {
  return make("button", { type: "button", class: "link", title, click: action, ...properties }, text);
}

/** The begin and the end of a long text. */
function shorten(text, length) {
  if (text.length <= length) return text;
  const head = Math.floor((length - 1) / 3);
  return `${text.slice(0, head)}…${text.slice(text.length - (length - 1 - head))}`;
}

/** Shortened text that shows the whole on hover. */
function short(text, length, properties = {}) {
  return make("span", { title: text, ...properties }, shorten(text, length));
}

function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

/** Milliseconds with three digits behind the point, as in the text reports. */
function milliseconds(seconds) {
  return (seconds * 1e3).toFixed(3);
}

function duration(seconds) {
  const size = Math.abs(seconds);
  if (size >= 1) return `${seconds.toFixed(3)} s`;
  if (size >= 1e-4 || size === 0) return `${milliseconds(seconds)} ms`;
  return `${(seconds * 1e6).toFixed(2)} µs`;
}

function byteSize(bytes) {
  if (bytes === null) return "?";
  if (bytes < 1024) return `${bytes} B`;
  let value = bytes;
  for (const unit of ["KiB", "MiB", "GiB", "TiB"]) {
    value /= 1024;
    if (value < 1024 || unit === "TiB") return `${value.toFixed(value < 10 ? 2 : 1)} ${unit}`;
  }
}

/** A size, with the exact number of bytes on hover. */
function bytesCell(bytes) {
  return make("span", { title: bytes === null ? "unknown" : count(bytes, "byte") }, byteSize(bytes));
}

function percent(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(1)} %` : "0 %";
}

/** A list of which the first few are shown, with a control that shows the others. */
function folded(items, shown, render, properties = {}) {
  const list = make("ul", { class: "folded", ...properties });
  const add = (some) => list.append(...some.map((item) => make("li", {}, render(item))));
  add(items.slice(0, shown));
  if (items.length > shown) {
    const more = make("li", {});
    const rest = items.slice(shown);
    more.append(link(`and ${rest.length} more`, `show all ${items.length}`, () => {
      more.remove();
      add(rest);
    }));
    list.append(more);
  }
  return list;
}

/** What a node is called inside of its group. */
function leafName(node) {
  const group = node.path.join(".");
  return group && node.name.startsWith(group) ? node.name.slice(group.length + 1) : node.name;
}

// What to do when a node is selected: each part of the page adds its own.
const onSelect = [];
let selected = -1;

/** Select a node everywhere; `from` names the part that asked, which needs no scrolling. */
function select(position, from) {
  selected = position;
  for (const act of onSelect) act(position, from);
}

/** The begin of a long text. */
function clip(text, length) {
  return text.length <= length ? text : `${text.slice(0, length - 1)}…`;
}
