// Put the page together.

function showReport() {
  const world = report.header.find(([name]) => name === "mesh");
  document.title = `Compiled step ${report.fingerprint.slice(0, 12)}${world ? `, ${world[1]}` : ""}`;
  showSummary();
  showLayouts();
  showTimeline();
  showCollectives();
  showFusion();
  showTree();
  showPasses();
  showNotes();
  showSearch();
}

showReport();
