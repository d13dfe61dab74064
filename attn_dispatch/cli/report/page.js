// The page's behaviour: theme, search and sorting, a decision's candidates, plots. Every text is set as text, never as
// markup.
"use strict";
(async () => {
  const PAGE_ROWS = 25;
  const SHAPES = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross"];
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (each) => each.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const find = (id) => document.getElementById(id);
  const make = (name, text, attributes = {}) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };

  // --- theme: the system's, until the button chooses ---

  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
  const button = find("theme");
  let redraw = () => {};
  const shown = () => {
    button.textContent = isDark() ? "Light theme" : "Dark theme";
    redraw();
  };
  try {
    const kept = localStorage.getItem("attn-dispatch-theme");
    if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  } catch { /* a browser may forbid storage for files */ }
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("attn-dispatch-theme", root.dataset.theme); } catch { /* as above */ }
    shown();
  });
  dark.addEventListener("change", shown);
  shown();
  const data = await new Response(unpacked).json();
  root.dataset.ready = "yes";
  if (data === null) return;

  // --- decisions ---

  const body = find("decided").tBodies[0];
  const heads = [...find("decided").tHead.rows[0].cells];
  const texts = (places) => places.map((place) => data.strings[place]);

  // As `sections._row` writes the first ones: all in the markup would make the page several times as large.
  const made = ([cells, silicon, changed, provisional], at) => {
    const row = make("tr", undefined, { "data-n": body.rows.length + at, "data-silicon": silicon,
      ...(changed && { "data-changed": "" }), ...(provisional && { "data-provisional": "" }) });
    cells.forEach(([places, value], column) => {
      const [text, small] = texts(places);
      const name = heads[column].textContent;
      const cell = column ? make("td") : make("th", undefined, { scope: "row" });
      if (!column) cell.append(make("button", text, { type: "button", "aria-expanded": "false" }));
      else cell.append(name === "key" ? make("code", text) : text);
      if (small !== undefined) cell.append(make("small", small));
      if (value !== null) cell.dataset.v = value;
      if (heads[column].className) cell.className = heads[column].className;
      row.append(cell);
    });
    return row;
  };
  const rows = [...body.rows, ...data.more.map(made)];
  const words = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
  let order = rows;
  let all = false;

  const list = () => {
    const wanted = find("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const silicon = find("silicon")?.value;
    const fits = order.filter((row) =>
      wanted.every((word) => words.get(row).includes(word)) &&
      (!find("changed").checked || "changed" in row.dataset) &&
      (!find("provisional").checked || "provisional" in row.dataset) &&
      (!silicon || row.dataset.silicon === silicon));
    const visible = all ? fits : fits.slice(0, PAGE_ROWS);
    body.replaceChildren(...visible.flatMap((row) => (opened.has(row) ? [row, opened.get(row)] : [row])));
    find("count").textContent = visible.length < fits.length
      ? `${visible.length} of ${fits.length} matching decisions shown; ${rows.length} in all`
      : `${fits.length} of ${rows.length} decisions`;
    find("more").hidden = visible.length === fits.length;
    find("more").textContent = `Show all ${fits.length}`;
  };

  const valueOf = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v);
  };
  const compare = (one, two) => {
    if (typeof one !== typeof two) return typeof one === "number" ? -1 : 1; // without a number: last
    return typeof one === "number" ? one - two : one.localeCompare(two, "en", { numeric: true });
  };
  heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
    const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    heads.forEach((each) => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
    order = rows.map((row) => [valueOf(row, column), row])
      .sort(([one], [two]) => (typeof one === typeof two ? direction : 1) * compare(one, two)).map(([, row]) => row);
    list();
  }));

  const tableOf = (caption, head, lines, chosen) => {
    const table = make("table");
    table.append(make("caption", caption));
    const top = table.createTHead().insertRow();
    head.forEach(([name, numeric]) => top.append(make("th", name, { scope: "col", class: numeric ? "n" : "" })));
    const inner = table.createTBody();
    lines.forEach((cells, number) => {
      const row = inner.insertRow();
      if (number === chosen) row.className = "chosen";
      cells.forEach((cell, at) => row.append(at
        ? make("td", cell, { class: `${head[at][1] ? "n" : ""} ${cell === "-" ? "none" : ""}`, "data-name": head[at][0] })
        : make("th", cell, { scope: "row" })));
    });
    const box = make("div", undefined, { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" });
    box.append(table);
    return box;
  };

  const opened = new Map();
  const detail = (row) => {
    const { about, rows: candidates } = data.decisions[row.dataset.n];
    const pairs = make("dl", undefined, { class: "pairs" });
    for (const [name, text] of about.map(texts)) pairs.append(make("dt", name), make("dd", text));
    const lines = candidates.map(texts);
    const chosen = lines.findIndex((line) => /^chosen\b/.test(line[line.length - 1]));
    const cell = make("td", undefined, { colspan: heads.length });
    cell.append(pairs, tableOf("Candidates of this decision", data.head, lines, chosen));
    const found = make("tr", undefined, { class: "detail" });
    found.append(cell);
    return found;
  };
  for (const row of rows) {
    const opener = row.cells[0].firstChild;
    opener.addEventListener("click", () => {
      const isOpen = opened.delete(row);
      opener.setAttribute("aria-expanded", String(!isOpen));
      if (!isOpen) opened.set(row, detail(row));
      list();
      opener.focus();
    });
  }
  for (const id of ["search", "changed", "provisional", "silicon"]) {
    find(id)?.addEventListener("input", () => { all = false; list(); });
  }
  find("search").form.addEventListener("submit", (event) => event.preventDefault());
  find("more").addEventListener("click", () => {
    const before = new Set(body.rows);
    all = true;
    list(); // hides the button, which had the focus
    [...body.rows].find((row) => !before.has(row))?.querySelector("button")?.focus();
  });
  list();

  // --- plots ---

  const candidates = new Map(data.candidates.map(([order, title, colour, shape], at) =>
    [at, { order, title, colour: `--c${colour}`, shape: SHAPES[shape % SHAPES.length] }]));
  const probe = make("span", undefined, { hidden: "" });
  document.body.append(probe);
  const colourOf = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  const tip = make("div", undefined, { id: "tip", hidden: "", "aria-hidden": "true" });
  document.body.append(tip);
  const showTip = (_, event, item, value) => {
    tip.hidden = !value;
    if (!value) return;
    tip.textContent = value;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - width - 8))}px`;
    tip.style.top = `${Math.max(4, event.clientY - height - 10)}px`;
  };

  // At most about seven: powers of 2, else 1, 2, 5 or more of each decade; in a range that has no two of them, its ends
  // and its middle, to three digits where those are inside.
  const ticksOf = (low, high, base) => {
    const found = roundTicks(low, high, base);
    if (found.filter((value) => value >= low && value <= high).length > 1) return found;
    const middle = Math.sqrt(low * high);
    const unit = base === 2 ? 1024 ** Math.max(0, Math.floor(Math.log2(low) / 10)) : 1;
    const rounded = [low, middle, high].map((value) => Number((value / unit).toPrecision(3)) * unit);
    const inside = [...new Set(rounded)].filter((value) => value >= low && value <= high);
    return inside.length > 1 ? inside : [middle];
  };
  const roundTicks = (low, high, base) => {
    if (base === 2) {
      const [first, last] = [Math.ceil(Math.log2(low)), Math.floor(Math.log2(high))];
      const step = Math.max(1, Math.ceil((last - first) / 7));
      return Array.from({ length: Math.max(0, Math.floor((last - first) / step) + 1) }, (_, at) => 2 ** (first + at * step));
    }
    const decades = Math.log10(high / low);
    const steps = decades > 3 ? [1] : decades > 1.6 ? [1, 3] : decades > 0.8 ? [1, 2, 5] : decades > 0.4 ? [1, 1.5, 2, 3, 5, 7]
      : [1, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 5, 6, 7, 8, 9];
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
      found.push(...steps.map((step) => Number((step * 10 ** power).toPrecision(3))));
    }
    return found.filter((value) => value >= low / 1.1 && value <= high * 1.1);
  };

  const views = new Map();
  const draw = (id, kind, points, marks, summary, nothing = "Nothing was measured.") => {
    const box = find(id);
    views.get(id)?.finalize();
    views.delete(id);
    if (!points.length) {
      ["role", "aria-label", "aria-roledescription"].forEach((name) => box.removeAttribute(name));
      box.textContent = nothing;
      return;
    }
    const spec = structuredClone(data.plots[kind]);
    const lengths = [...new Set(points.map((point) => point.tokens))].sort((a, b) => a - b);
    const reference = kind === "gain" ? [1] : [];
    const low = Math.min(...points.map((point) => point.low), ...reference);
    const high = Math.max(...points.map((point) => point.high), ...reference);
    const ticks = ticksOf(low, high, kind === "memory" ? 2 : 10);
    const set = { lengths, ticks, span: [lengths[0] / 1.25, lengths[lengths.length - 1] * 1.25], ink: colourOf("--soft") };
    for (const signal of spec.signals) if (signal.name in set) signal.value = set[signal.name];
    spec.data.find((each) => each.name === "points").values = points;
    spec.data.find((each) => each.name === "marks").values = marks;
    spec.width = box.clientWidth;
    delete spec.background;
    const [soft, line] = [colourOf("--soft"), colourOf("--line")];
    const config = {
      font: getComputedStyle(document.body).fontFamily,
      axis: { labelColor: soft, titleColor: soft, tickColor: line, domainColor: line, gridColor: line,
        labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal" },
      style: { cell: { stroke: "transparent" } },
    };
    const view = new vega.View(vega.parse(spec, config), { renderer: "svg", container: box, logLevel: vega.error });
    views.set(id, view.tooltip(showTip));
    view.runAsync().then(() => {
      if (views.get(id) !== view) return; // another has taken its place
      // In place of Vega's: one picture with a summary. The table below has its numbers.
      box.setAttribute("role", "img");
      box.removeAttribute("aria-roledescription");
      box.setAttribute("aria-label", summary);
      box.querySelector("svg").setAttribute("aria-hidden", "true");
    });
  };

  const looks = (at, { title, colour, shape, order } = candidates.get(at)) =>
    ({ name: title, order, shape, colour: colourOf(colour) });
  const factor = ([low, middle, high]) => `${middle.toFixed(2)}x (${low.toFixed(2)} - ${high.toFixed(2)})`;

  const off = new Set(); // places of candidates that are not drawn
  const drawSeries = () => {
    const select = find("series");
    if (!select) return;
    const { points, crossings, notes, defaults } = data.series[select.value];
    const of = select.selectedOptions[0].textContent;
    const cut = points.filter(([candidate]) => !off.has(candidate));
    const cellsOf = (decision, row) => texts(data.decisions[decision].rows[row]);
    const lines = cut.map(([candidate, tokens, , , , , gain, decision, row]) => {
      const [, , median, interval, , memory] = cellsOf(decision, row);
      return [candidates.get(candidate).title, tokens.toLocaleString("en"), median, interval, gain ? factor(gain) : "-", memory];
    });
    const point = (at, value, low, high) => ({ ...looks(cut[at][0]), tokens: cut[at][1], value, low, high,
      text: `${lines[at][0]}, ${lines[at][1]} tokens\n${lines[at][2]} (${lines[at][3]})\n` +
        `gain ${lines[at][4]}\nmemory ${lines[at][5]}` });
    const each = (value) => cut.flatMap((row, at) => { const found = value(row); return found ? [point(at, ...found)] : []; });
    const marks = crossings.filter(([tokens]) => tokens !== null)
      .map(([tokens]) => ({ tokens, text: `~${Number(tokens.toPrecision(2)).toLocaleString("en")}` }));
    const nothing = cut.length ? undefined : "No candidate is chosen above.";
    const changes = crossings.map(([, text]) => `Fastest: ${text}`);
    draw("plot-time", "time", each(([, , ...times]) => times.slice(0, 3)), marks,
      `Time against length of ${of}. ${changes.join(". ")}`, nothing);
    draw("plot-gain", "gain", each(([, , , , , , gain]) => gain && [gain[1], gain[0], gain[2]]), [],
      `Time of the default (${defaults.join(", ") || "none"}) over the candidate's, against length, of ${of}`, nothing);
    draw("plot-memory", "memory", each(([, , , , , bytes]) => bytes ? [bytes, bytes, bytes] : null), [],
      `Peak memory against length of ${of}`, nothing);
    const texts_ = [...changes, ...notes];
    if (defaults.length) texts_.push(`The default here: ${defaults.join(", ")}.`);
    find("crossings").replaceChildren(...texts_.map((text) => make("li", text)));
    const head = [["candidate", false], ["tokens", true], ["median", true], ["interval", true],
      ["default / this", true], ["peak memory", true]];
    find("numbers").replaceChildren(tableOf(`Measurements of ${of}`, head, lines));
  };

  const swatch = ({ colour, order, shape }) => {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    svg.setAttribute("viewBox", "0 0 34 14");
    svg.setAttribute("aria-hidden", "true");
    const line = document.createElementNS(space, "path");
    line.setAttribute("d", "M1 7H33");
    line.setAttribute("style", `stroke: var(${colour}); stroke-width: 2`);
    const dash = data.dashes[order];
    if (dash) line.setAttribute("stroke-dasharray", dash.join(" "));
    const sign = document.createElementNS(space, "path");
    sign.setAttribute("d", { circle: "M17 3a4 4 0 1 0 .01 0Z", square: "M13.5 3.5h7v7h-7Z", "triangle-up": "M17 2l4.5 9h-9Z",
      diamond: "M17 1.5l4 5.5-4 5.5-4-5.5Z", "triangle-down": "M17 12l4.5-9h-9Z",
      cross: "M15.5 2.5h3v3h3v3h-3v3h-3v-3h-3v-3h3Z" }[shape]);
    sign.setAttribute("style", `fill: var(${colour})`);
    svg.append(line, sign);
    return svg;
  };
  const chooseSeries = () => {
    const select = find("series");
    if (!select) return;
    const there = new Set(data.series[select.value].points.map(([candidate]) => candidate));
    const labels = [...candidates].filter(([at]) => there.has(at)).map(([at, each]) => {
      const label = make("label");
      const box = make("input", undefined, { type: "checkbox" });
      box.checked = !off.has(at);
      box.addEventListener("input", () => {
        if (box.checked) off.delete(at); else off.add(at);
        drawSeries();
      });
      label.append(box, swatch(each), each.title);
      return label;
    });
    find("legend").replaceChildren(find("legend").firstElementChild, ...labels);
    drawSeries();
  };
  find("series")?.addEventListener("input", chooseSeries);

  const drawOrder = () => {
    const select = find("order");
    if (!select) return;
    const { tokens, text, points, measured } = data.orders[select.value];
    const of = select.selectedOptions[0].textContent;
    const drawn = points.map(([length, middle, low, high]) => ({ name: of, order: "natural", shape: "circle",
      colour: colourOf("--c7"), tokens: length, value: middle, low, high,
      text: `${length.toLocaleString("en")} tokens\n${factor([low, middle, high])}` }));
    const marks = tokens === null ? [] : [{ tokens, text: `from ${tokens.toLocaleString("en")}` }];
    draw("plot-order", "gain", drawn, marks, `Gain of ${of} against length: ${text}`);
    find("threshold").textContent = `Pays: ${text}.`;
    const lines = measured.map(([length, middle, low, high, decision]) => [length.toLocaleString("en"),
      `${middle.toFixed(2)}x`, `${low.toFixed(2)} - ${high.toFixed(2)}`, rows[decision].cells[0].textContent]);
    const head = [["tokens", true], ["gain", true], ["interval", true], ["decision", false]];
    find("evidence").replaceChildren(tableOf(`Evidence of ${of}`, head, lines));
  };
  find("order")?.addEventListener("input", drawOrder);

  redraw = () => { drawSeries(); drawOrder(); };
  chooseSeries();
  drawOrder();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    redraw();
  });
})();
