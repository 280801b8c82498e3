"use strict";
// A click on a column's name sorts the table by it, numbers by their value; a second click sorts the other way round.
// Cells without a value stay last.
function key(row, column) {
  const cell = row.cells[column];
  if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
  return cell.textContent === "-" ? null : cell.textContent;
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), undefined, { numeric: true });
}

function sort(table, column) {
  const heads = [...table.tHead.rows[0].cells];
  const sign = heads[column].getAttribute("aria-sort") === "ascending" ? -1 : 1;
  const rows = [...table.tBodies[0].rows].sort((one, other) => {
    const a = key(one, column), b = key(other, column);
    if (a === null || b === null) return (a === null) - (b === null);
    return sign * compare(a, b);
  });
  table.tBodies[0].append(...rows);
  heads.forEach((head) => head.removeAttribute("aria-sort"));
  heads[column].setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
}

for (const table of document.querySelectorAll("table.data")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(table, column));
    head.append(button);
  });
}

// What a cell of a map is of, where the pointer is.
for (const map of document.querySelectorAll("table.map")) {
  map.addEventListener("mouseover", ({ target }) => {
    if (target.tagName !== "TD" || target.title) return;
    const layer = target.parentElement.cells[0].textContent;
    const text = target.classList.contains("x") ? "dense" : target.textContent;
    target.title = `layer ${layer}, head ${target.cellIndex - 1}: ${map.caption.textContent} ${text}`;
  });
}
