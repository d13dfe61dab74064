// Fills the plots. Everything else is HTML and CSS.
"use strict";
(async () => {
  const find = (id) => document.getElementById(id);
  const packed = Uint8Array.from(atob(find("data").textContent), (each) => each.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const { spec, all } = await new Response(unpacked).json();
  const [container, select] = [find("plot"), find("series")];
  const view = new vega.View(vega.parse(spec), { renderer: "svg", container, logLevel: vega.error });
  const draw = () => {
    const points = all[select.value];
    document.querySelectorAll(".notes").forEach((each, at) => { each.hidden = at !== Number(select.value); });
    view.data("points", points).width(container.clientWidth - 75).runAsync();
  };
  select.addEventListener("input", draw);
  addEventListener("resize", draw);
  draw();
  document.documentElement.dataset.ready = "yes";
})();
