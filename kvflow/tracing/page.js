"use strict";
(function () {
  const table = document.querySelector(".requests");
  if (!table) {
    return;
  }
  const body = table.tBodies[0];
  const rows = Array.from(body.querySelectorAll("tr.request"));
  const data = JSON.parse(document.getElementById("histories").textContent);
  const filter = document.getElementById("filter");
  const shown = document.getElementById("shown");

  function element(name, text, className) {
    const made = document.createElement(name);
    if (text !== undefined) {
      made.textContent = text;
    }
    if (className) {
      made.className = className;
    }
    return made;
  }

  function historyOf(row) {
    const events = data.transfers[Number(row.dataset.transfer)];
    const made = element("tr", undefined, "history");
    const cell = element("td");
    cell.colSpan = row.cells.length;
    cell.append(element("div", row.dataset.about));
    const list = element("table");
    const head = element("tr");
    for (const name of ["ms", "engine", "machine", "trigger", "from", "to", ""]) {
      head.append(element("th", name, name === "ms" ? "" : "text"));
    }
    list.append(head);
    for (const [ms, engine, machine, trigger, from, to, more] of events) {
      const line = element("tr");
      line.append(element("td", ms));
      for (const text of [data.workers[engine], machine]) {
        line.append(element("td", text, "text " + machine));
      }
      for (const text of [trigger, from, to]) {
        line.append(element("td", text, "text"));
      }
      line.append(element("td", more, "text long"));
      list.append(line);
    }
    cell.append(list);
    made.append(cell);
    return made;
  }

  function button(row) {
    return row.querySelector("button.open");
  }

  function isOpen(row) {
    return button(row).getAttribute("aria-expanded") === "true";
  }

  function toggle(row, open) {
    if (open === isOpen(row)) {
      return;
    }
    button(row).setAttribute("aria-expanded", String(open));
    if (open) {
      row.after(historyOf(row));
    } else {
      row.nextElementSibling.remove();
    }
  }

  function sortBy(header) {
    const falling = header.getAttribute("aria-sort") === "descending";
    const sign = falling ? 1 : -1;
    const key = header.dataset.key;
    for (const other of table.tHead.querySelectorAll("th[aria-sort]")) {
      other.setAttribute("aria-sort", "none");
    }
    header.setAttribute("aria-sort", falling ? "ascending" : "descending");
    const value = (row) => Number(row.dataset[key]);
    rows.forEach((row) => toggle(row, false));
    rows.sort((one, other) => sign * (value(one) - value(other)));
    body.append(...rows);
  }

  function applyFilter() {
    const wanted = filter.value.trim().toLowerCase();
    let count = 0;
    for (const row of rows) {
      const fits = row.dataset.find.toLowerCase().includes(wanted);
      if (!fits) {
        toggle(row, false);
      }
      row.hidden = !fits;
      count += fits ? 1 : 0;
    }
    shown.textContent = count + " of " + rows.length;
  }

  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr.request");
    if (row && String(window.getSelection()) === "") {
      toggle(row, !isOpen(row));
    }
  });
  table.tHead.addEventListener("click", (event) => {
    const header = event.target.closest("th[data-key]");
    if (header) {
      sortBy(header);
    }
  });
  filter.addEventListener("input", applyFilter);
  document.getElementById("full").addEventListener("change", (event) => {
    table.classList.toggle("full", event.target.checked);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && event.target !== filter) {
      event.preventDefault();
      filter.focus();
    } else if (event.key === "Escape" && event.target === filter) {
      filter.value = "";
      applyFilter();
    }
  });

  function openNamed() {
    let named = location.hash.slice(1);
    try {
      named = decodeURIComponent(named);
    } catch (error) {
      return;
    }
    const row = rows.find((each) => named !== "" && each.dataset.id === named);
    if (row) {
      toggle(row, true);
      row.scrollIntoView();
    }
  }

  window.addEventListener("hashchange", openNamed);
  applyFilter();
  openNamed();
  document.documentElement.dataset.ready = "yes";
})();
