// Searches and sorts the decisions, and fills the plots. Everything else is HTML and CSS.
"use strict";
(async () => {
  const find = (id) => document.getElementById(id);
  const bodies = [...find("decided").tBodies];
  const words = bodies.map((body) => `${body.rows[0].textContent} ${(body.querySelector("summary, p")).textContent}`.toLowerCase());
  find("search").addEventListener("input", ({ target }) => {
    const wanted = target.value.toLowerCase().split(/\s+/);
    bodies.forEach((body, at) => { body.hidden = !wanted.every((word) => words[at].includes(word)); });
    find("count").textContent = `${bodies.filter((body) => !body.hidden).length} of ${bodies.length} decisions`;
  });
  const heads = [...find("decided").tHead.rows[0].cells];
  heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
    const down = head.ariaSort === "ascending" ? -1 : 1;
    heads.forEach((each) => { each.ariaSort = each === head ? (down > 0 ? "ascending" : "descending") : null; });
    const value = ({ rows: [{ cells }] }) => cells[column].dataset.v ?? cells[column].textContent;
    const compare = (one, two) => (one - two || one.localeCompare(two, "en", { numeric: true })) * down;
    find("decided").append(...[...bodies].sort((one, two) => compare(value(one), value(two))));
  }));

  const packed = Uint8Array.from(atob(find("data").textContent), (each) => each.charCodeAt(0));
  const data = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  for (const [name, { spec, all }] of Object.entries(data)) {
    const [container, select] = [find(`plot-${name}`), find(name)];
    const view = new vega.View(vega.parse(spec), { renderer: "svg", container, logLevel: vega.error });
    const draw = () => {
      const [points, marks] = all[select.value];
      document.querySelectorAll(`[data-of=${name}]`).forEach((each, at) => { each.hidden = at !== Number(select.value); });
      const names = [...new Set(points.map((point) => point.name))];
      view.data("points", points).data("marks", marks).signal("names", names).width(container.clientWidth - 75).runAsync();
    };
    select.addEventListener("input", draw);
    addEventListener("resize", draw);
    draw();
  }
  document.documentElement.dataset.ready = "yes";
})();
