"use strict";
// Returns a function that shows the data of a lens.
const lens = (() => {
  const kinds = { u1: Uint8Array, i1: Int8Array, u2: Uint16Array, f4: Float32Array };
  // Unpack the numbers of a head when it is shown for the first time.
  async function unpack(d) {
    if (!d.blob) return;
    const packed = Uint8Array.from(atob(d.blob), c => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const bytes = await new Response(stream).arrayBuffer();
    for (const [name, [kind, at, size]] of Object.entries(d.arrays)) d[name] = new kinds[kind](bytes, at, size);
    d.blob = "";
  }
  const at = id => document.getElementById(id);
  const text = at("text"), range = at("cursor"), choice = at("head"), status = at("status");
  let data, details, T, spans, cursor, view, shown, name;

  const make = (name, attributes = {}, content = "") => {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = content;
    return element;
  };
  const percent = x => x >= 0.995 ? "100 %" : x >= 0.0995 ? `${Math.round(100 * x)} %` : x >= 0.0005 ? `${(100 * x).toFixed(1)} %` : "0 %";
  const life = ({ half: x, beyond }) => x === null ? `> ${beyond.toLocaleString("en")}` : x < 10 ? x.toFixed(1) : Math.round(x).toLocaleString("en");
  const tokens = n => `${n.toLocaleString("en")} token${n === 1 ? "" : "s"}`;
  const word = i => `“${data.tokens[i].replace(/\n/g, "↵")}”`;
  const begins = i => data.documents.filter(first => first <= i).pop();

  // The share of token j's write after token t. Between two stored positions its logarithm is interpolated.
  function stored(d, grid, t, j) {
    if (j > t || begins(j) !== begins(t)) return 0;
    let low = 0, high = d.cursors.length - 1;
    while (low < high) { const middle = (low + high + 1) >> 1; if (d.cursors[middle] <= t) low = middle; else high = middle - 1; }
    if (d.cursors[low] === t) return grid[low * T + j] / 255;
    const before = j >= d.cursors[low] ? [j, 1] : [d.cursors[low], grid[low * T + j] / 255];
    const after = [d.cursors[low + 1], grid[(low + 1) * T + j] / 255];
    if (begins(after[0]) !== begins(t)) return before[1];
    const share = (t - before[0]) / (after[0] - before[0]);
    return Math.exp((1 - share) * Math.log(before[1] + 1e-4) + share * Math.log(after[1] + 1e-4)) - 1e-4;
  }
  const listed = (d, index, value, scale, i, k) => {
    const found = [];
    for (let n = i * k; n < (i + 1) * k; n++) if (value[n]) found.push([index[n], value[n] / 127 * scale[i]]);
    return found;
  };
  const reads = (d, t) => listed(d, d.read_index, d.read_value, d.read_scale, t, d.k);
  const readers = (d, j) => listed(d, d.later_index, d.later_value, d.later_scale, j, d.k_later);

  function paint() {
    const d = details[shown];
    if (!d || d.blob) return; // its numbers are being unpacked
    const head = data.heads[d.head];
    const alpha = new Float32Array(T), kind = new Array(T).fill("");
    if (view === "left") for (let j = 0; j <= cursor; j++) alpha[j] = stored(d, d.left, cursor, j);
    if (view === "lost") for (let j = 0; j <= cursor; j++) {
      const left = stored(d, d.left, cursor, j), faded = d.faded ? stored(d, d.faded, cursor, j) : left;
      alpha[j] = 1 - left;
      kind[j] = faded - left > 1 - Math.max(faded, left) ? "over" : "faded";
    }
    const pairs = view === "read" ? reads(d, cursor) : view === "later" ? readers(d, cursor) : [];
    const most = Math.max(1e-9, ...pairs.map(([, share]) => Math.abs(share)));
    for (const [i, share] of pairs) { alpha[i] = Math.sqrt(Math.abs(share) / most); kind[i] = share < 0 ? "minus" : ""; }
    spans.forEach((span, i) => {
      span.style.setProperty("--a", alpha[i].toFixed(3));
      for (const name of ["minus", "faded", "over"]) span.classList.toggle(name, kind[i] === name);
      span.classList.toggle("later", i > cursor && view !== "later");
      span.classList.toggle("at", i === cursor);
      span.classList.toggle("resets", Boolean(d.resets && d.resets[i]));
    });
    range.value = cursor;
    range.setAttribute("aria-valuetext", `token ${cursor + 1} of ${T}, ${word(cursor)}`);
    status.textContent = sentence(d, head, pairs, alpha);
    at("legend").textContent = legend(d);
    table(d, pairs, alpha);
  }
  function sentence(d, head, pairs, alpha) {
    const place = `Token ${(cursor + 1).toLocaleString("en")} ${word(cursor)}, ${head.name}: `;
    if (view === "left") {
      let half = 0;
      for (let j = begins(cursor); j <= cursor; j++) half += alpha[j] >= 0.5;
      return `${place}half or more of the write is left of ${half.toLocaleString("en")} of ${tokens(cursor + 1 - begins(cursor))}. Its half-life is ${life(head)} tokens, and it stores ${(head.stored[0] + head.stored[1] * (cursor + 1 - begins(cursor))).toLocaleString("en")} bytes${head.stored[1] ? `, ${head.stored[1]} for each token` : ""}.`;
    }
    if (view === "lost") {
      let over = 0, faded = 0;
      for (let j = 0; j <= cursor; j++) if (alpha[j] > 0.5) spans[j].classList.contains("over") ? over++ : faded++;
      return `${place}more than half of ${(over + faded).toLocaleString("en")} writes is lost, of ${faded.toLocaleString("en")} mostly to ${d.resets ? "decay and resets" : "decay"}${d.faded ? ` and of ${over.toLocaleString("en")} to tokens that overwrote them` : ""}${begins(cursor) ? "; documents that ended are lost as a whole" : ""}.`;
    }
    if (!pairs.length) return place + (view === "read" ? "it reads nothing." : "no later token reads it among the most that it reads.");
    const [i, share] = pairs[0];
    return view === "read"
      ? `${place}most of what it reads is ${word(i)}, ${i === cursor ? "itself" : `${tokens(cursor - i)} back`}, with ${percent(Math.abs(share))}.`
      : `${place}it is read most at ${word(i)}, ${tokens(i - cursor)} later, where it is ${percent(Math.abs(share))} of what is read.`;
  }
  function legend(d) {
    if (view === "left") return "The stronger the colour of a token, the more of its write is left in the state at the cursor.";
    if (view === "lost") return `The stronger the colour of a token, the more of its write is lost: grey to decay${d.faded ? ", red to other tokens that overwrote it" : ""}.`;
    const what = view === "read" ? `the ${d.k} earlier tokens with the most of what the cursor's token reads` : `the ${d.k_later} tokens that read the cursor's token most`;
    return `Colours show ${what}: blue adds the value, orange subtracts it. Shares are |weight| · ‖value‖.`;
  }
  function table(d, pairs, alpha) {
    const host = at("most");
    host.replaceChildren();
    const rows = view === "read" || view === "later" ? pairs : [];
    if (!rows.length) return;
    const list = make("table");
    list.append(make("caption", {}, view === "read" ? "Read most at the cursor" : "Where the token is read"));
    const header = make("tr");
    for (const name of ["token", "position", "distance", "share", "weight"]) header.append(make("th", { scope: "col" }, name));
    list.append(header);
    for (const [i, share] of rows.slice(0, 10)) {
      const [reader, source] = view === "read" ? [cursor, i] : [i, cursor];
      const weight = share * d.total[reader] / (d.sizes[source] || 1);
      const row = make("tr");
      row.append(make("td", { class: "word" }, data.tokens[i].replace(/\n/g, "↵")));
      for (const cell of [i + 1, reader - source, percent(Math.abs(share)), weight.toPrecision(3)]) row.append(make("td", {}, String(cell)));
      list.append(row);
    }
    host.append(list);
  }

  function strip() {
    const top = Math.log(Math.max(T / 2, ...data.heads.map(head => head.half ?? 0)) + 1);
    const rows = new Map();
    at("strip").replaceChildren();
    data.heads.forEach((head, i) => rows.set(head.layer, [...(rows.get(head.layer) || []), i]));
    for (const [layer, heads] of rows) {
      const row = make("tr");
      row.append(make("th", { scope: "row" }, layer));
      for (const i of heads) {
        const head = data.heads[i], index = details.findIndex(d => d.head === i);
        const cell = make("td"), name = `${head.name}, half-life ${life(head)} tokens`;
        const button = index < 0 ? make("div", { title: name }, life(head))
          : make("button", { type: "button", title: name, "aria-label": name, "aria-pressed": "false" }, life(head));
        button.style.setProperty("--a", (Math.log((head.half ?? head.beyond) + 1) / top).toFixed(3));
        if (index >= 0) button.addEventListener("click", () => choose(index));
        button.dataset.index = index;
        cell.append(button);
        row.append(cell);
      }
      at("strip").append(row);
    }
  }
  function pairTable() {
    at("pairs").replaceChildren();
    if (!data.pairs.length) return;
    const list = make("table");
    list.append(make("caption", {}, "Pairs of the task: green underlines are answered right, red ones are not"));
    const header = make("tr");
    for (const name of ["key", "value", "distance", "probability of the right answer", "answer"]) header.append(make("th", { scope: "col" }, name));
    list.append(header);
    for (const pair of data.pairs) {
      for (const i of [pair.written, pair.asked]) spans[i].classList.add(pair.known ? "known" : "forgotten");
      const row = make("tr");
      for (const cell of [data.tokens[pair.asked], pair.value, pair.asked - pair.written, percent(pair.probability), pair.known ? "known" : "forgotten"])
        row.append(make("td", {}, String(cell)));
      list.append(row);
    }
    at("pairs").append(list);
  }
  async function choose(index) {
    const wanted = details;
    await unpack(details[index]);
    if (details !== wanted) return; // another text was shown meanwhile
    shown = index;
    name = data.heads[details[index].head].name;
    choice.value = index;
    for (const button of document.querySelectorAll("#strip button")) button.setAttribute("aria-pressed", String(Number(button.dataset.index) === index));
    paint();
  }
  let waiting = false;
  function move(to) {
    cursor = Math.max(0, Math.min(T - 1, to));
    if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; paint(); }); }
  }

  function show(given) {
    if (!given) return;
    data = given;
    details = data.details;
    T = data.tokens.length;
    cursor = data.cursor;
    view ??= data.view;
    spans = data.tokens.map((token, i) => {
      const span = make("span", {}, token === "" ? "·" : token.replace(/\n/g, "↵\n"));
      span.dataset.i = i;
      if (data.documents.includes(i) && i) span.classList.add("begins");
      return span;
    });
    text.classList.toggle("ids", data.ids);
    text.replaceChildren(...spans);
    range.max = T - 1;
    at("summary").textContent = data.summary;
    at("absent").textContent = data.absent;
    at("lens").hidden = false;
    choice.replaceChildren(...details.map((d, i) => {
      const head = data.heads[d.head];
      return make("option", { value: i }, `${d.label ? `${d.label}: ` : ""}${head.name} (${life(head)} tokens)`);
    }));
    document.querySelector(`[name=view][value=${view}]`).checked = true;
    strip();
    pairTable();
    return choose(Math.max(0, details.findIndex(d => data.heads[d.head].name === name)));
  }
  choice.addEventListener("change", () => choose(Number(choice.value)));
  range.addEventListener("input", () => move(Number(range.value)));
  for (const radio of document.querySelectorAll("[name=view]")) radio.addEventListener("change", () => { view = radio.value; paint(); });
  const pointed = event => { const span = document.elementFromPoint(event.clientX, event.clientY); if (span && span.dataset.i && text.contains(span)) move(Number(span.dataset.i)); };
  text.addEventListener("pointerdown", pointed);
  text.addEventListener("pointermove", event => { if (event.buttons) pointed(event); });
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
  text.addEventListener("keydown", event => {
    if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    move(cursor + steps[event.key]);
  });
  return show;
})();
lens(JSON.parse(document.getElementById("data").textContent));
