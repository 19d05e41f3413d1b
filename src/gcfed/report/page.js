"use strict";
// Sorting and filtering of what the page holds already; without this script the page only lacks these two.

for (const table of document.querySelectorAll("table.sortable")) {
  table.querySelectorAll("thead th:not([data-unsorted])").forEach((heading) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => sort(table, heading));
  });
}

function sort(table, heading) {
  const upward = heading.getAttribute("aria-sort") !== "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", upward ? "ascending" : "descending");
  const direction = upward ? 1 : -1;
  const body = table.tBodies[0];
  const keyed = [...body.rows].map((row) => [key(row.cells[heading.cellIndex]), row]);
  keyed.sort(([a], [b]) => {
    if (a === "" || b === "") return (a === "") - (b === ""); // what was not measured comes last, in both directions
    return direction * (typeof a === "number" && typeof b === "number" ? a - b : compare(String(a), String(b)));
  });
  body.append(...keyed.map(([, row]) => row));
}

const compare = new Intl.Collator("en", { numeric: true }).compare;

function key(cell) {
  const text = cell.dataset.value ?? cell.textContent.trim();
  return text === "" || text === "–" ? "" : Number.isNaN(Number(text)) ? text : Number(text);
}

for (const form of document.querySelectorAll("form[data-filters]")) {
  const rows = [...document.getElementById(form.dataset.filters).tBodies[0].rows];
  const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
  const apply = () => {
    const words = form.querySelector("input[type=search]").value.toLowerCase().split(/\s+/);
    const states = new Set([...form.querySelectorAll("input:checked")].map((box) => box.value));
    for (const row of rows) {
      row.hidden = !states.has(row.dataset.state) || !words.every((word) => texts.get(row).includes(word));
    }
    const shown = rows.filter((row) => !row.hidden).length;
    form.querySelector("output").textContent = `${shown} of ${rows.length} runs`;
  };
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  apply();
}

// A link to a run must not lead to a line that a filter hides.
window.addEventListener("hashchange", () => {
  const row = document.getElementById(location.hash.slice(1));
  if (row?.hidden) {
    row.hidden = false;
    row.scrollIntoView();
  }
});
