const data = JSON.parse(at("data").textContent);
const talk = [];
let running = null;

// The pieces of text of a stream of events.
async function* pieces(answer) {
  let rest = "";
  for await (const text of answer.body.pipeThrough(new TextDecoderStream())) {
    const lines = (rest + text).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event.choices[0]?.delta?.content ?? event.choices[0]?.text ?? "";
    }
  }
}
function turn(role, content) {
  const message = { role, content }, box = document.createElement("div"), words = document.createElement("p");
  const name = document.createElement("b");
  name.textContent = role === "user" ? "You" : data.model;
  words.textContent = content;
  box.className = role;
  box.append(name, words);
  at("talk").append(box);
  at("talk").hidden = false;
  talk.push(message);
  return piece => { message.content += piece; words.textContent = message.content; at("talk").scrollTop = at("talk").scrollHeight; };
}
async function write() {
  const text = at("text").value;
  const settings = { stream: true, temperature: Number(at("temperature").value), max_tokens: Number(at("tokens").value) };
  running = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;
  say("The model reads.");
  let add = piece => { at("text").value += piece; at("text").scrollTop = at("text").scrollHeight; };
  let count = 0;
  try {
    if (data.chat) turn("user", text);
    const body = data.chat ? { messages: talk, ...settings } : { prompt: text, ...settings };
    const answer = await ask(data.chat ? "/v1/chat/completions" : "/v1/completions", body, running.signal);
    if (data.chat) { add = turn("assistant", ""); at("text").value = ""; }
    for await (const piece of pieces(answer)) { if (!count) say("The model writes."); count += piece.length; add(piece); }
    say(`It wrote ${count.toLocaleString("en")} character${count === 1 ? "" : "s"}.`);
  } catch (error) {
    if (data.chat && talk.at(-1)?.role === "user") { talk.pop(); at("talk").lastChild.remove(); }
    error.name === "AbortError" ? say("Stopped.") : say(error.message, true);
  }
  at("send").disabled = false;
  at("stop").disabled = true;
  at("text").focus();
}
at("form").addEventListener("submit", event => { event.preventDefault(); if (!at("send").disabled) write(); });
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", () => { running?.abort(); talk.length = 0; at("talk").replaceChildren(); at("talk").hidden = true; at("text").value = ""; say(""); });
at("look").addEventListener("click", () => {
  sessionStorage.text = [...talk.map(message => message.content), at("text").value].filter(Boolean).join("\n");
  location.href = "/look";
});
// Enter sends a message; a text to continue has lines of its own.
at("text").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.isComposing || event.shiftKey || !(data.chat || event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  at("form").requestSubmit();
});
