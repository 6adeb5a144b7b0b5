"use strict";
// The spectrum explorer: time-scales and responses of a layer's channels at the position chosen with the slider.
(() => {
  const { page, find, byId, make, number, place, table, tables } = report;
  if (!page.spectra) return;
  const { models, names } = page.spectra;
  const [model, layer, position] = [byId("model"), byId("layer"), byId("position")];
  const SHOWN = 12; // lines of the response
  const LAGS = 60;
  const SLOW = [0, 114, 178], FAST = [230, 159, 0]; // blue and orange differ for colour-blind readers too
  let entry, length, own, known, sums; // sums are those of the channels that were shown

  const at = (rows) => rows && rows[Math.min(Number(position.value), rows.length - 1)];
  const evenly = (items, count) =>
    items.length <= count ? items : Array.from({ length: count }, (_, i) => items[Math.round((i * (items.length - 1)) / (count - 1))]);

  // Sums the rates 1/τ up to each position. Between known positions, log τ is interpolated linearly in log position.
  function summed(rows, positions, channel) {
    const total = new Float64Array(positions.at(-1) + 1);
    for (let t = 1, i = 0; t < total.length; t++) {
      while (i < positions.length - 2 && positions[i + 1] < t) i++;
      let scale = rows[Math.min(i, rows.length - 1)][channel];
      if (rows.length > 1) {
        const share = Math.log(t / positions[i]) / Math.log(positions[i + 1] / positions[i]);
        scale *= (rows[i + 1][channel] / scale) ** share;
      }
      total[t] = total[t - 1] + 1 / scale;
    }
    return total;
  }

  function chooseModel() {
    entry = models[Number(model.value)];
    length = entry.length;
    const kept = layer.value;
    layer.replaceChildren(...entry.layers.map((one, i) => make("option", `${one.layer}`, { value: i })));
    if (entry.layers[kept]) layer.value = kept;
    const t = position.dataset.t ?? length;
    position.max = entry.positions.length - 1;
    const nearest = entry.positions.map((p) => Math.abs(Math.log(p / t)));
    position.value = nearest.indexOf(Math.min(...nearest));
    byId("note").textContent = entry.note;
    chooseLayer();
  }

  function chooseLayer() {
    own = entry.layers[Number(layer.value)];
    known = own.channels.map((_, i) => i).filter((i) => own.trained.every((row) => row[i] !== null));
    sums = new Map();
    move();
  }

  const times = (t) => (t === length ? "T" : `${Number((t / length).toPrecision(2))} T`);
  const decades = (span) => (span > 3.5 ? { dtick: 1 } : { dtick: "D2", tickformat: ",~g" }); // ticks at powers of ten, or also at 2 and 5 times each
  const rate = (i) => (own.taper ? `, α = ${own.taper[i]}` : "");
  const line = (value, dash, text) => ({
    type: "line", xref: "paper", x0: 0, x1: 1, y0: value, y1: value, line: { color: page.ink, width: 1, dash },
    label: { text, textposition: "end", yanchor: "bottom", font: { color: page.ink } },
  });

  function scales(t) {
    const dots = (name, rows, symbol) => ({
      type: "scatter", mode: "markers", name, x: own.channels, y: at(rows),
      marker: { symbol, size: own.channels.length > 24 ? 6 : 9, color: "#0072b2", line: { width: 1.5, color: "#0072b2" } },
      hovertemplate: own.channels.map((k, i) => `channel ${k}${rate(i)}<br>${name}: %{y:.4g} tokens<extra></extra>`),
    });
    const every = [own.trained, own.initial].flat(2).filter((x) => x !== null && x !== undefined).concat(1, length * 16);
    const [low, high] = [Math.min(...every), Math.max(...every)].map(Math.log10);
    return {
      title: "Time-scale at t",
      data: [...(own.initial ? [dots(names.hollow, own.initial, "circle-open")] : []), dots(names.filled, own.trained, "circle")],
      layout: {
        height: 340, xaxis: { title: { text: `channel (${entry.channels})` }, range: [0.4, own.total + 0.6], tickvals: own.total <= SHOWN ? own.channels : undefined },
        yaxis: { title: { text: "time-scale (tokens)" }, type: "log", range: [low - 0.15, high + 0.25], ...decades(high - low) },
        shapes: [line(length, "dash", "T"), ...(t === length ? [] : [line(t, "dot", "t")])],
      },
    };
  }

  function response(t) {
    const spaced = Array.from({ length: LAGS }, (_, i) => Math.round(t ** (i / (LAGS - 1))));
    const lags = [...new Set(spaced.flatMap((s) => [s, t + 1 - s]))].sort((a, b) => a - b); // dense at both ends
    const slowness = at(own.trained);
    const slowestFirst = evenly(known.sort((a, b) => slowness[b] - slowness[a]), SHOWN);
    const data = slowestFirst.map((i, place) => {
      if (!sums.has(i)) sums.set(i, summed(own.trained, entry.positions, i));
      const sum = sums.get(i);
      const share = place / Math.max(slowestFirst.length - 1, 1);
      const mixed = SLOW.map((from, c) => Math.round(from + share * (FAST[c] - from)));
      return {
        type: "scatter", mode: t > 2 ? "lines" : "lines+markers", name: `channel ${own.channels[i]}`, x: lags,
        y: lags.map((s) => Math.exp(sum[t - s] - sum[t])), line: { color: `rgb(${mixed})`, width: 3 - 2 * share },
        hovertemplate: `channel ${own.channels[i]}${rate(i)}<br>%{x:,} tokens before: %{y:.2%}<extra></extra>`,
      };
    });
    const furthest = entry.positions.at(-1);
    const ends = [[length, "dash", "T"], ...(t === length ? [] : [[t, "dot", "t"]])];
    return {
      title: "Response",
      data,
      layout: {
        height: 340, xaxis: { title: { text: "lag s (tokens)" }, type: "log", range: [-0.05, Math.log10(furthest) + 0.05], ...decades(Math.log10(furthest)) },
        yaxis: { title: { text: "response" }, tickformat: ".0%", range: [-0.03, 1.03] },
        shapes: ends.map(([x, dash, text]) => ({
          type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color: page.ink, width: 1, dash },
          label: { text, textposition: "end", textangle: 0, yanchor: "bottom", font: { color: page.ink } },
        })),
      },
    };
  }

  function listed() {
    const [now, start] = [at(own.trained), at(own.initial)];
    const digits = (value) => number(value, false, 4);
    const rows = own.channels.map((k, i) => [
      `${k}`, digits(now[i]), digits(now[i] === null ? null : now[i] * Math.LN2), digits(start?.[i]), digits(own.taper?.[i]),
    ]);
    const heads = ["channel", "time-scale (tokens)", "half-life (tokens)", names.column, "taper α"];
    const made = table(`${entry.label}, layer ${own.layer}, at ${byId("at").textContent}`, heads, rows);
    byId("channels").replaceChildren(...made.childNodes);
  }

  let shown;
  const refill = tables(find("#explorer details")[0], () => [shown]);

  function move() {
    const t = entry.positions[Number(position.value)];
    position.dataset.t = t;
    byId("at").textContent = `t = ${t.toLocaleString("en")} (${times(t)})`;
    position.setAttribute("aria-valuetext", byId("at").textContent);
    shown = response(t);
    place(byId("scales"), scales(t));
    place(byId("response"), shown);
    listed();
    refill();
  }

  model.addEventListener("change", chooseModel);
  layer.addEventListener("change", chooseLayer);
  position.addEventListener("input", move);
  chooseModel();
})();
