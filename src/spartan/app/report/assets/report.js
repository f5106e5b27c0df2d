// The page around the charts: theme, sortable tables, copy buttons.

(() => {
  const root = document.documentElement;
  const charts = {};
  for (const spec of JSON.parse(document.getElementById("data").textContent).charts) {
    const figure = document.querySelector(`[data-chart="${spec.id}"]`);
    charts[spec.id] = new Chart(figure, spec);
  }

  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch { /* a browser may forbid it; the page still turns */ }
  });

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of heads) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = row => row.cells[column].dataset.key;
      const rows = [...body.rows], numbers = rows.every(r => key(r) === "" || Number.isFinite(+key(r)));
      const compare = (a, b) => (numbers ? key(a) - key(b) : key(a).localeCompare(key(b), "en", { numeric: true }));
      // What is not known stands last, whichever way the rest is sorted.
      rows.sort((a, b) => (key(a) === "") - (key(b) === "") || (up ? compare(a, b) : compare(b, a)));
      body.append(...rows);
    }));
  }

  for (const box of document.querySelectorAll(".copy")) {
    const [button, text] = box.children;
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text.textContent);
        button.textContent = "Copied";
      } catch {
        // No clipboard on some file:// pages: select it, so that one key copies.
        getSelection().selectAllChildren(text);
        button.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl+C";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }

  root.dataset.ready = Object.keys(charts).length;
})();
