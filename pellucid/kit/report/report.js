"use strict";
// The table and the panes. All text goes into the page as text (textContent), never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const table = document.getElementById("kernels");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const keys = rows.map((row) => Array.from(row.cells, (cell) => cell.dataset.key));
  const search = rows.map((row) => row.dataset.search);
  const number = new Map(rows.map((row, at) => [row, at]));

  // ------------------------------------------------------------------------------------------ sorting, filtering
  const show = (sorted) => body.append(...sorted);
  for (const [at, head] of Array.from(table.tHead.rows[0].cells).entries()) {
    head.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const compare = at === 0
        ? (a, b) => keys[number.get(b)][0].localeCompare(keys[number.get(a)][0])
        : (a, b) => keys[number.get(a)][at] - keys[number.get(b)][at];
      const sorted = rows.slice().sort(compare);
      show(down ? sorted.reverse() : sorted);
    });
  }
  const filter = document.getElementById("filter");
  const group = document.getElementById("group");
  const count = document.getElementById("count");
  const narrow = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, at) => {
      const hit = words.every((word) => search[at].includes(word)) && (!group.value || row.dataset.group === group.value);
      row.hidden = !hit;
      shown += hit;
    });
    count.textContent = `${shown} of ${rows.length}`;
  };
  filter.addEventListener("input", narrow);
  group.addEventListener("change", narrow);

  // ------------------------------------------------------------------------------------------ panes
  const pane = (name) => document.querySelector(`#pane-${name} .lines`);
  const element = (kind, text, into) => {
    const made = document.createElement("div");
    made.className = kind;
    made.textContent = text;
    into.append(made);
    return made;
  };
  const say = (into, text) => element("say", text, into);
  const line = (into, text, links, hit, label) => {
    const made = element(hit ? "l hit" : "l", "", into);
    if (label !== undefined) {
      const at = document.createElement("span");
      at.className = "n";
      at.textContent = label;
      made.append(at);
    }
    const cut = /^(.*?\S)(\s{2,}(?:\/\/|#) .*)$/.exec(text);
    made.append(cut ? cut[1] : text);
    if (cut) {
      const comment = document.createElement("span");
      comment.className = "c";
      comment.textContent = cut[2];
      made.append(comment);
    }
    if (links.length) made.dataset.keys = JSON.stringify(links);
    return made;
  };
  // The origin of a line of IR or C++ according to its comment: names of nodes, and files with lines.
  const origins = (text, nodes) => {
    const comment = /\s{2}(?:\/\/|#) (.*)$/.exec(text);
    if (!comment) return [];
    const words = comment[1].split(/,\s+|\s{2,}|\s(?=\()/);
    return words.filter((word) => nodes.has(word) || /:\d+$/.test(word)).map((word) => (nodes.has(word) ? `n ${word}` : `l ${word}`));
  };

  const showPython = (kernel) => {
    const into = pane("python");
    into.replaceChildren();
    const files = new Map();
    for (const [file, at] of kernel.places) {
      if (!files.has(file)) files.set(file, new Set());
      files.get(file).add(at);
    }
    if (!files.size) say(into, "Its lines in your program are unknown.");
    for (const [file, hits] of files) {
      element("file", file, into);
      const known = Object.hasOwn(data.source, file) ? data.source[file] : {};
      const near = new Set();
      for (const at of hits) for (let n = at - 5; n <= at + 5; n++) if (hits.has(n) || Object.hasOwn(known, n)) near.add(n);
      let last = 0;
      for (const n of [...near].sort((a, b) => a - b)) {
        if (last && n > last + 1) say(into, "⋯");
        last = n;
        const text = Object.hasOwn(known, n) ? known[n] : "(the run does not contain this line)";
        line(into, text, [`l ${file}:${n}`], hits.has(n), String(n));
      }
    }
  };
  const showNodes = (kernel, nodes) => {
    const into = pane("fx");
    into.replaceChildren();
    for (const graph of new Set(kernel.steps.map(([name]) => name))) {
      const lines = Object.hasOwn(data.graphs, graph) ? data.graphs[graph].fx : [];
      const at = lines.flatMap(([, name], n) => (name && nodes.has(name) ? [n] : []));
      if (!at.length) continue;
      element("file", graph, into);
      const near = new Set(at.flatMap((n) => [n - 2, n - 1, n, n + 1, n + 2]));
      let last = -1;
      for (const n of [...near].filter((each) => lines[each]).sort((a, b) => a - b)) {
        if (last >= 0 && n > last + 1) say(into, "⋯");
        last = n;
        const [text, name, file, number] = lines[n];
        const links = name ? [`n ${name}`, ...(file ? [`l ${file}:${number}`] : [])] : [];
        line(into, text.trimStart(), links, nodes.has(name));
      }
    }
    if (!into.childElementCount) say(into, kernel.fx.length ? `Nodes: ${kernel.fx.join(", ")}` : "Its FX nodes are unknown.");
  };
  const showText = (name, lines, nodes, missing) => {
    const into = pane(name);
    into.replaceChildren();
    if (!lines.length) return say(into, missing);
    for (const text of lines) line(into, text, origins(text, nodes), false);
  };

  const select = (at, scroll) => {
    const kernel = data.kernels[at];
    const nodes = new Set(kernel.fx);
    for (const each of document.querySelectorAll(".on")) each.classList.remove("on");
    for (const each of document.querySelectorAll(`[data-kernel="${at}"]`)) each.classList.add("on");
    rows[at].classList.add("on");
    if (scroll) rows[at].scrollIntoView({ block: "center" });
    document.getElementById("chosen").textContent = `${kernel.name}${kernel.symbol === kernel.name ? "" : `  ${kernel.symbol}`}`;
    showPython(kernel);
    showNodes(kernel, nodes);
    const [graph, step] = kernel.steps[0] || ["", ""];
    const ir = Object.hasOwn(data.graphs, graph) && Object.hasOwn(data.graphs[graph].ir, step) ? data.graphs[graph].ir[step] : "";
    const cpp = Object.hasOwn(data.cpp, kernel.symbol) ? data.cpp[kernel.symbol] : [];
    const late = at >= data.kernels.length - data.left_out ? "Omitted to limit the size of the page: see the run. " : "";
    showText("ir", ir ? ir.split("\n") : [], nodes, `${late}The backend prints no separate loops for this step.`);
    const library = kernel.kind === "call" ? "A library call: its code is not generated." : "The run has no C++ for it.";
    const shared = kernel.steps.length;
    showText("cpp", cpp, nodes, late || library);
    document.querySelector("#pane-cpp h3 span").textContent = cpp.length && shared > 1 ? `shared by ${shared} calls` : "";
    for (const each of ["python", "fx"]) {
      const hit = pane(each).querySelector(".hit");
      if (hit) pane(each).scrollTop = hit.offsetTop - pane(each).offsetTop - 60;
    }
  };
  const link = (target) => {
    const chosen = new Set(JSON.parse(target.dataset.keys));
    for (const each of document.querySelectorAll(".pane .lines")) {
      let first = null;
      for (const other of each.querySelectorAll(".l")) {
        const same = other === target || (other.dataset.keys && JSON.parse(other.dataset.keys).some((key) => chosen.has(key)));
        other.classList.toggle("linked", Boolean(same));
        first = first || (same ? other : null);
      }
      if (first && !each.contains(target)) each.scrollTop = first.offsetTop - each.offsetTop - 60;
    }
  };
  document.querySelector(".panes").addEventListener("click", (event) => {
    const target = event.target.closest(".l[data-keys]");
    if (target) link(target);
  });
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (row) select(number.get(row), false);
  });
  document.addEventListener("click", (event) => {
    const other = event.target.closest("[data-kernel]");
    if (!other) return;
    select(Number(other.dataset.kernel), true);
    if (other.tagName === "A") event.preventDefault();
  });
  narrow();
  if (rows.length) select(0, false);
})();
(() => {
  const button = document.getElementById("copy");
  const text = document.getElementById("issue");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text.value);
    } catch {
      text.closest("details").open = true;
      text.select();
      document.execCommand("copy");
    }
    button.textContent = "copied";
  });
})();
