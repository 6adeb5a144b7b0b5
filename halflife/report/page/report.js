"use strict";
// The report page: draws the plots in the page's colours, lists their numbers, and sorts the summary table.
const report = (() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const find = (selector, within = document) => [...within.querySelectorAll(selector)];
  const byId = (id) => document.getElementById(id);
  const say = (text) => { byId("status").textContent = text; };

  const make = (tag, text, attributes = {}) => {
    const element = Object.assign(document.createElement(tag), { textContent: text ?? "" });
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };

  // ------------------------------------------------------------------------------------------------- plots

  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.style.colorScheme || (system.matches ? "dark" : "light")) === "dark";
  const coarse = matchMedia("(pointer: coarse)").matches; // there, dragging scrolls the page

  function colours() {
    const { color: ink, backgroundColor: paper } = getComputedStyle(document.body);
    const steps = page.recall[isDark() ? "dark" : "light"];
    const recall = steps.map((colour, i) => [i / (steps.length - 1), colour]);
    return { ink, paper, named: { [page.ink]: ink, recall } };
  }

  // Copies a plot's data and replaces its named colours by those of the page.
  function themed(value, named) {
    if (Array.isArray(value)) return value.map((item) => themed(item, named));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, themed(item, named)]));
    return typeof value === "string" && Object.hasOwn(named, value) ? named[value] : value;
  }

  function axis(own, { ink }) {
    const faint = ink.replace("rgb(", "rgba(").replace(")", ", 0.13)");
    const title = { ...own?.title, standoff: 8 };
    return { gridcolor: faint, linecolor: faint, zeroline: false, automargin: true, tickangle: 0, separatethousands: true, exponentformat: "none", ...own, title };
  }

  // Draws a panel {data, layout} into its element and resets its zoom.
  function draw(element, panel) {
    const colour = colours();
    const clear = "rgba(0,0,0,0)";
    const { xaxis, yaxis, ...own } = themed(panel.layout, colour.named);
    const empty = { text: page.noData, xref: "paper", yref: "paper", x: 0.5, y: 0.5, showarrow: false };
    const layout = {
      annotations: panel.data.some((one) => one.x.length) ? [] : [empty],
      width: element.clientWidth, height: 280, margin: { l: 48, r: 14, t: 24, b: 40 }, paper_bgcolor: clear, plot_bgcolor: clear,
      font: { family: "system-ui, sans-serif", size: 12, color: colour.ink }, showlegend: false, hovermode: "closest",
      hoverlabel: { bgcolor: colour.paper, bordercolor: colour.ink, font: { color: colour.ink }, align: "left" },
      dragmode: coarse ? false : "zoom", ...own, xaxis: axis(xaxis, colour), yaxis: axis(yaxis, colour),
    };
    const options = { displayModeBar: false, doubleClick: "reset", showTips: false };
    return Plotly.react(element, themed(panel.data, colour.named), layout, options);
  }

  // Panels are drawn when they come near the window, and the others one by one when there is time, because a page may
  // have dozens, and whoever prints it or takes a picture of it wants all.
  const panels = new Map();
  const near = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries)
      if (isIntersecting) {
        near.unobserve(target);
        draw(target, panels.get(target));
      }
  }, { rootMargin: "600px" });

  const sized = new ResizeObserver((entries) => {
    for (const { target } of entries)
      if (drawn(target) && target.clientWidth && target.layout.width !== target.clientWidth) // a hidden frame has no width
        Plotly.relayout(target, { width: target.clientWidth });
  });

  const drawn = (element) => element.classList.contains("js-plotly-plot");
  const repaint = (all = false) => {
    for (const [element, panel] of panels) if (all || drawn(element)) draw(element, panel);
  };

  // Sets or replaces the panel of an element.
  function place(element, panel) {
    panels.set(element, panel);
    if (drawn(element)) draw(element, panel);
    else near.observe(element);
    sized.observe(element);
  }

  const whenIdle = window.requestIdleCallback ?? setTimeout;
  function drawNext() {
    const element = [...panels.keys()].find((one) => !drawn(one) && one.clientWidth);
    if (!element) return;
    near.unobserve(element);
    draw(element, panels.get(element));
    whenIdle(drawNext);
  }
  addEventListener("load", () => whenIdle(drawNext));

  for (const figure of find("[data-plot]")) {
    const own = page.plots[figure.dataset.plot];
    find(".plot", figure).forEach((element, i) => place(element, own[i]));
    const redraw = () => find(".plot", figure).filter(drawn).forEach((element) => draw(element, panels.get(element)));
    for (const key of find("[data-key]", figure))
      key.addEventListener("click", () => {
        const shown = key.getAttribute("aria-pressed") !== "true";
        key.setAttribute("aria-pressed", shown);
        for (const trace of own.flatMap((panel) => panel.data))
          if (trace.legendgroup === key.dataset.key) trace.visible = shown;
        redraw();
      });
    find(".reset", figure)[0].addEventListener("click", redraw);
    tables(find("details.data", figure)[0], () => own);
  }

  // ------------------------------------------------------------------------------- the numbers of plots as tables

  const number = (value, percent = false, digits = 5) => {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    if (percent) return `${(100 * value).toFixed(2)} %`;
    return value.toLocaleString("en", { maximumSignificantDigits: digits });
  };

  function table(caption, heads, rows) {
    const element = make("table");
    element.append(make("caption", caption));
    const fill = (section, cells, heading) => {
      const row = section.insertRow();
      cells.forEach((text, i) => row.append(make(...heading(text, i))));
    };
    fill(element.createTHead(), heads, (text) => ["th", text, { scope: "col" }]);
    const body = element.createTBody();
    for (const cells of rows)
      fill(body, cells, (text, i) => (i ? ["td", text] : ["th", text, { scope: "row" }]));
    return element;
  }

  function tabulated({ title, data, layout }) {
    if (data[0]?.type === "heatmap") {
      const { x, y, z } = data[0];
      return table(title, [layout.yaxis.title.text, ...x], y.map((row, i) => [row, ...z[i].map((cell) => number(cell, true))]));
    }
    const percent = (layout.yaxis.tickformat ?? "").includes("%") || data.some((one) => /:\.\d%/.test(one.hovertemplate));
    const columns = data.map((one) => new Map(one.x.map((x, i) => [x, one.y[i]])));
    const xs = [...new Set(data.flatMap((one) => one.x))].sort((a, b) => a - b);
    const rows = xs.map((x) => [Number.isInteger(x) ? x.toLocaleString("en") : number(x), ...columns.map((own) => number(own.get(x), percent))]);
    return table(title, [layout.xaxis.title.text, ...data.map((one) => one.name)], rows);
  }

  // Fills a <details> element with a table of each current panel when it is opened. Returns a function that fills it again.
  function tables(details, current) {
    const fill = () => {
      if (!details.open) return;
      find(".wide", details).forEach((old) => old.remove());
      for (const panel of current()) {
        const box = make("div", "", { class: "wide tall", role: "region", tabindex: 0, "aria-label": `Data: ${panel.title}` });
        box.append(tabulated(panel));
        details.append(box);
      }
    };
    details.addEventListener("toggle", fill);
    return fill;
  }

  // ---------------------------------------------------------------------------------------------- sorting

  for (const button of find(".summary thead button")) {
    const head = button.closest("th");
    const whole = head.closest("table");
    const groups = [...whole.tBodies]; // in their original order
    const column = Number(button.dataset.column);
    const plain = (group) => group.rows[0].cells[0].firstChild.textContent.replaceAll(",", "").trim();
    const value = (group) => Number(group.rows[0].cells[column].dataset.value ?? NaN);
    const orders = column ? ["descending", "ascending", "none"] : ["ascending", "descending", "none"];
    button.addEventListener("click", () => {
      const order = orders[(orders.indexOf(head.getAttribute("aria-sort")) + 1) % orders.length];
      find("th[aria-sort]", whole).forEach((other) => other.removeAttribute("aria-sort"));
      const sign = order === "ascending" ? 1 : -1;
      const sorted = [...groups];
      if (order !== "none") {
        head.setAttribute("aria-sort", order);
        sorted.sort((a, b) => {
          if (!column) return sign * plain(a).localeCompare(plain(b), "en", { numeric: true });
          const [x, y] = [value(a), value(b)];
          return Number.isNaN(x) - Number.isNaN(y) || sign * (x - y); // rows without a number stay last
        });
      }
      whole.append(...sorted);
      say(order === "none" ? "In the original order" : `Sorted by ${button.textContent}, ${order}`);
    });
  }

  // ------------------------------------------------------------------------------------------ theme, copying, printing

  const theme = byId("theme");
  const press = () => theme.setAttribute("aria-pressed", isDark());
  theme.addEventListener("click", () => {
    root.style.colorScheme = isDark() ? "light" : "dark";
    press();
    repaint();
    say(`${isDark() ? "Dark" : "Light"} theme`);
  });
  system.addEventListener("change", () => { press(); repaint(); });
  press();

  for (const button of find(".copy"))
    button.addEventListener("click", async () => {
      const code = find("code", button.parentElement)[0];
      try {
        await navigator.clipboard.writeText(code.textContent);
        say("Copied");
      } catch {
        getSelection().selectAllChildren(code);
        say("Selected: copy it with the keyboard");
      }
    });

  let before = null;
  addEventListener("beforeprint", () => {
    before = root.style.colorScheme;
    root.style.colorScheme = "light";
    root.classList.add("printing"); // as narrow as paper, because plots and tables do not shrink by themselves
    for (const one of find(".more")) one.open = true;
    for (const box of find(".wide"))
      if (box.clientWidth) box.firstElementChild.style.zoom = Math.min(1, box.clientWidth / box.scrollWidth);
    repaint(true);
  });
  addEventListener("afterprint", () => {
    root.style.colorScheme = before;
    root.classList.remove("printing");
    for (const one of find(".more")) one.open = false;
    for (const box of find(".wide")) box.firstElementChild.style.zoom = "";
    repaint();
  });

  return { page, find, byId, make, number, place, table, tables };
})();
