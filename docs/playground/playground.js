const here = name => new URL(name, import.meta.url).href;
const at = id => document.getElementById(id);
const KEPT = 16; // words from one state that is kept to the next, so that a change far behind is read at once
const SILENT = new Set(["is", "are"]);
const FIRST = at("typed").value;
let about, models = [], pieces = [], ids = [], facts = [], cursor = 0, turn = 0;

const make = (name, attributes = {}, ...content) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...content);
  return element;
};
const percent = x => x >= 0.995 ? "100 %" : x >= 0.0995 ? `${Math.round(100 * x)} %` : x >= 0.0005 ? `${(100 * x).toFixed(1)} %` : "0 %";
const within = (id, [low, high]) => id >= low && id < high;

// A word that the models do not know is one of those without a meaning, always the same.
function idOf(word) {
  const known = about.words.indexOf(word);
  if (known >= 0) return known;
  let sum = 0;
  for (const letter of word) sum = (31 * sum + letter.codePointAt(0)) % 9973;
  return about.others[0] + sum % (about.others[1] - about.others[0]);
}
function parse(text) {
  pieces = (text.match(/[\p{L}\p{N}]+|[^\p{L}\p{N}]+/gu) || []).map(piece => {
    const word = piece.toLowerCase();
    return { text: piece, id: /[\p{L}\p{N}]/u.test(piece) && !SILENT.has(word) ? idOf(word) : null };
  });
  ids = pieces.filter(piece => piece.id !== null).map(piece => piece.id);
  facts = [];
  for (let i = 1; i < ids.length; i++)
    if (within(ids[i - 1], about.names) && within(ids[i], about.values)) facts.push({ key: ids[i - 1], value: ids[i], at: i });
}
// What was said last of a name before a word.
const lastFact = (key, before) => facts.filter(fact => fact.key === key && fact.at < before).pop();

async function read(model, mine) {
  let same = 0;
  while (same < model.ids.length && same < ids.length && model.ids[same] === ids[same]) same++;
  same -= same % KEPT;
  model.ids.length = model.seen.length = Math.min(same, model.ids.length);
  const { Tensor } = model;
  let given = model.kept[same / KEPT];
  for (let t = same; t < ids.length; t++) {
    const slot = new Float32Array(about.slots);
    slot[t] = 1;
    const found = await model.session.run({
      ids: new Tensor("int64", BigInt64Array.of(BigInt(ids[t])), [1, 1]), slot: new Tensor("float32", slot, [about.slots]), ...given,
    });
    if (mine !== turn) return;
    given = Object.fromEntries(model.names.map(name => [name, found[`${name}.after`]]));
    if ((t + 1) % KEPT === 0) model.kept[(t + 1) / KEPT] = given;
    const one = { logits: found.logits.data };
    for (const kind of ["weights", "norms", "size"]) one[kind] = Array.from({ length: about.layers }, (_, layer) => found[`${layer}.${kind}`].data);
    model.ids.push(ids[t]);
    model.seen.push(one);
  }
}
// The share of every word in what the cursor's word reads, with the sign of its weight.
function reads(model, layer, head, t) {
  const parts = Array.from({ length: t + 1 }, (_, j) => model.seen[t].weights[layer][head * about.slots + j] * model.seen[j].size[layer][head]);
  const total = parts.reduce((sum, x) => sum + Math.abs(x), 0) || 1;
  return parts.map(x => x / total);
}
// The share of every word's write that is left after the cursor's word.
function left(model, layer, head, t) {
  return Array.from({ length: t + 1 }, (_, j) => {
    const at = head * about.slots + j;
    return model.seen[t].norms[layer][at] / (model.seen[j].norms[layer][at] || 1);
  });
}
function answer(model, t) {
  const logits = model.seen[t].logits, most = Math.max(...logits);
  const chances = Array.from(logits, x => Math.exp(x - most)), sum = chances.reduce((a, b) => a + b);
  const best = chances.indexOf(Math.max(...chances)), fact = lastFact(ids[t], t);
  if (!fact) return "Write a name of which something was said, and the model says it again.";
  const word = about.words[best] || "nothing", sure = percent(chances[best] / sum), name = about.words[ids[t]];
  return best === fact.value ? `✓ ${name} is ${word}: right, with ${sure}.`
    : `✗ ${name} is ${word}? Wrong, with ${sure}; it was ${about.words[fact.value]}, with ${percent(chances[fact.value] / sum)}.`;
}
function headOf(model, t) {
  if (model.choice.value !== "most") return model.choice.value.split(" ").map(Number);
  const fact = lastFact(ids[t], t), target = fact ? fact.at : 0;
  const scores = model.heads.map(([layer, head]) => Math.abs(reads(model, layer, head, t)[target]));
  return model.heads[scores.indexOf(Math.max(...scores))];
}
function paint() {
  if (!ids.length) return;
  const view = document.querySelector("[name=shown]:checked").value;
  at("place").max = ids.length - 1;
  at("place").value = cursor;
  const word = about.words[ids[cursor]];
  at("place").setAttribute("aria-valuetext", `word ${cursor + 1} of ${ids.length}, ${word}`);
  for (const model of models) {
    if (model.seen.length !== ids.length) continue;
    const [layer, head] = headOf(model, cursor), shares = reads(model, layer, head, cursor), rest = left(model, layer, head, cursor);
    const colours = view === "read" ? shares : rest, most = view === "read" ? Math.max(...colours.map(Math.abs)) || 1 : 1;
    let i = 0;
    model.words.replaceChildren(...pieces.map(piece => {
      if (piece.id === null) return piece.text;
      const span = make("span", { "data-i": i }, piece.text), x = colours[i] ?? 0;
      span.style.setProperty("--a", Math.min(1, Math.sqrt(Math.abs(x) / most)).toFixed(3));
      span.classList.toggle("minus", x < 0);
      span.classList.toggle("at", i++ === cursor);
      return span;
    }));
    model.answer.textContent = answer(model, cursor);
    model.choice.options[0].textContent = `reads most: layer ${layer}, head ${head}`;
    const rows = facts.filter(fact => fact.at <= cursor).map(fact => make("tr", {},
      make("th", { scope: "row" }, `${about.words[fact.key]} ${about.words[fact.value]}`),
      ...[cursor - fact.at, percent(rest[fact.at]), percent(Math.abs(shares[fact.at]))].map(x => make("td", {}, String(x)))));
    const names = ["fact", "words ago", "left", "read"].map(name => make("th", { scope: "col" }, name));
    model.table.replaceChildren(make("caption", {}, `At ${word}, layer ${layer}, head ${head}`), make("tr", {}, ...names), ...rows);
  }
}
async function change() {
  const mine = ++turn;
  parse(at("typed").value);
  if (ids.length > about.slots) return tell(`The page reads ${about.slots} words at most; these are ${ids.length}.`);
  cursor = Math.max(0, ids.length - 1);
  const start = performance.now();
  for (const model of models) {
    await read(model, mine);
    if (mine !== turn) return;
  }
  paint();
  tell(`${ids.length} words, read by ${models.length} models in ${((performance.now() - start) / 1000).toFixed(1)} s.`);
}
const tell = words => { at("told").textContent = words; };
// Write words before the question, which is the last word.
function insert(words) {
  const [, text, question] = at("typed").value.match(/^([\s\S]*?)([\p{L}\p{N}]*[^\p{L}\p{N}]*)$/u);
  at("typed").value = `${text.trimEnd()} ${words} ${question.trim()}`.trim();
  change();
}
function panel(name) {
  const heads = [];
  const choice = make("select", {}, make("option", { value: "most" }, ""));
  const model = { ids: [], seen: [], kept: [], heads, choice, words: make("div", { class: "words", tabindex: 0, role: "group", "aria-label": `The text as ${name} remembers it` }), answer: make("p", { class: "answer" }), table: make("table") };
  at("models").append(make("section", { "aria-label": name }, make("h2", {}, name), model.answer, make("label", {}, "Head ", choice), model.words, model.table));
  choice.addEventListener("change", paint);
  model.words.addEventListener("click", event => { if (event.target.dataset.i) { cursor = Number(event.target.dataset.i); paint(); } });
  return model;
}
async function load() {
  const ort = await import(here("vendor/ort.wasm.bundle.min.mjs"));
  ort.env.wasm.wasmPaths = here("vendor/");
  ort.env.wasm.numThreads = 1;
  about = await (await fetch(here("playground.json"))).json();
  for (const [file, name] of Object.entries(about.models)) {
    const model = panel(name);
    model.Tensor = ort.Tensor;
    model.session = await ort.InferenceSession.create(here(`${file}.onnx`), { executionProviders: ["wasm"] });
    const shapes = about.state[file];
    model.names = Object.keys(shapes);
    model.kept[0] = Object.fromEntries(model.names.map(key => {
      const [kind, ...shape] = shapes[key], size = shape.reduce((a, b) => a * b, 1);
      return [key, kind === "int64" ? new ort.Tensor(kind, new BigInt64Array(size), shape) : new ort.Tensor(kind, new Float32Array(size), shape)];
    }));
    for (let layer = 0; layer < about.layers; layer++) for (let head = 0; head < shapes[`${layer}.columns`][2]; head++) {
      model.heads.push([layer, head]);
      model.choice.append(make("option", { value: `${layer} ${head}` }, `layer ${layer}, head ${head}`));
    }
    models.push(model);
  }
  at("typed").addEventListener("input", change);
  at("place").addEventListener("input", () => { cursor = Number(at("place").value); paint(); });
  for (const radio of document.querySelectorAll("[name=shown]")) radio.addEventListener("change", paint);
  at("again").addEventListener("click", () => { at("typed").value = FIRST; change(); });
  at("chatter").addEventListener("click", () => insert(Array.from({ length: 50 }, () => about.words[about.others[0] + Math.floor(Math.random() * (about.others[1] - about.others[0]))]).join(" ")));
  at("change").addEventListener("click", () => {
    const name = ids.at(-1), old = lastFact(name, ids.length)?.value, [low, high] = about.values;
    if (within(name, about.names)) insert(`${about.words[name]} is ${about.words[low + (old === undefined ? 0 : (old - low + 7) % (high - low))]}.`);
  });
  await change();
}
at("say").addEventListener("submit", event => event.preventDefault());
load().catch(error => tell(location.protocol === "file:" ? "A page that was opened as a file cannot load the models; serve its folder: python -m http.server." : `The models cannot be loaded: ${error.message}`));
