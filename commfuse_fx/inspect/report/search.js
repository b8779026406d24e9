// Search by node, op or parameter. `/` goes to the box, Enter to the next match, Escape clears.

const MATCHES_SHOWN = 30;

const search = { found: [], at: -1, texts: null };

/** What each node is found by: name, op, and the members of its collective. */
function searchTexts() {
  return nodes.map((node, position) => {
    const each = collectiveAt.get(position);
    return `${node.name}\n${node.op}\n${each ? each.members.join("\n") : ""}`.toLowerCase();
  });
}

function findMatches() {
  const wanted = part("query").value.trim().toLowerCase();
  if (!search.texts) search.texts = searchTexts();
  search.at = -1;
  search.found = [];
  if (wanted) {
    search.texts.forEach((text, position) => {
      if (text.includes(wanted)) search.found.push(position);
    });
  }
  showMatches(wanted);
}

function showMatches(wanted) {
  const box = part("matches");
  const rows = search.found.slice(0, MATCHES_SHOWN).map((position, i) => make("button",
    { type: "button", title: nodes[position].name, mousedown: (event) => event.preventDefault(), click: () => goToMatch(i) },
    make("span", {}, shorten(nodes[position].name, 62)), make("small", {}, nodes[position].op)));
  if (search.found.length > MATCHES_SHOWN) rows.push(make("p", {}, `and ${search.found.length - MATCHES_SHOWN} more; Enter goes to the next`));
  box.replaceChildren(...rows);
  box.hidden = !rows.length;
  showCount(wanted);
}

function showCount(wanted) {
  const at = search.at < 0 ? "" : `${search.at + 1} of `;
  const noun = search.found.length === 1 ? "match" : "matches";
  part("count").textContent = wanted ? `${at}${search.found.length.toLocaleString("en")} ${noun}` : "";
}

function goToMatch(i) {
  if (!search.found.length) return;
  search.at = (i + search.found.length) % search.found.length;
  part("matches").hidden = true;
  showCount(true);
  select(search.found[search.at], "search");
}

function clearSearch() {
  part("query").value = "";
  findMatches();
}

function searchKey(event) {
  if (event.key === "Enter") {
    event.preventDefault();
    goToMatch(event.shiftKey ? Math.max(search.at, 0) - 1 : search.at + 1);
  } else if (event.key === "Escape") {
    event.preventDefault();
    clearSearch();
    part("query").blur();
  }
}

function showSearch() {
  const box = part("query");
  box.addEventListener("input", findMatches);
  box.addEventListener("keydown", searchKey);
  box.addEventListener("blur", () => (part("matches").hidden = !part("matches").contains(document.activeElement)));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || event.target === box) return;
    event.preventDefault();
    box.focus();
    box.select();
  });
}
