"use strict";
// Draws the plots, paints them in the page's colours, and hides sides at a click.
(() => {
  const items = JSON.parse(document.getElementById("plots").textContent);
  const views = [];

  function models() {
    return views.flatMap((view) => [...view.model.document.all_models]);
  }

  function paint() {
    const style = getComputedStyle(document.documentElement);
    const [ink, muted, line] = ["--ink", "--muted", "--line"].map((name) => style.getPropertyValue(name).trim());
    for (const model of models()) {
      if (/Axis$/.test(model.type)) {
        model.setv({
          axis_label_text_color: muted, major_label_text_color: muted, axis_line_color: line,
          major_tick_line_color: line, minor_tick_line_color: null, axis_label_text_font_style: "normal",
        });
      } else if (model.type === "Grid") {
        model.setv({ grid_line_color: line });
      } else if (model.type === "Title") {
        model.setv({ text_color: ink });
      } else if (model.type === "Span" && model.tags.includes("rule")) {
        model.setv({ line_color: muted });
      }
    }
  }

  function show(side, visible) {
    for (const model of models()) {
      if (model.tags.includes(`side:${side}`)) model.visible = visible;
    }
  }

  for (const button of document.querySelectorAll("button[data-side]")) {
    button.addEventListener("click", () => {
      const visible = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(visible));
      show(button.dataset.side, visible);
    });
  }

  async function draw() {
    for (const [id, item] of Object.entries(items)) {
      const found = await Bokeh.embed.embed_item(item, id);
      views.push(...("roots" in found ? found.roots : found));
    }
    paint();
    document.documentElement.dataset.drawn = String(Object.keys(items).length);
  }

  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(query).addEventListener("change", paint);
  }
  draw();
})();
