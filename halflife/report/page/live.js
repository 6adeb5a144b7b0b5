let wanted = null, timer = 0;
async function read() {
  wanted?.abort();
  const text = at("typed").value;
  if (!text) return say("");
  wanted = new AbortController();
  say("The model reads.");
  try {
    const answer = await ask("/v1/look", { input: text }, wanted.signal);
    await lens(await answer.json());
    say("");
  } catch (error) {
    if (error.name !== "AbortError") say(error.message, true);
  }
}
at("typed").value = sessionStorage.text || "";
at("typed").addEventListener("input", () => { sessionStorage.text = at("typed").value; clearTimeout(timer); timer = setTimeout(read, 400); });
if (at("key")) at("key").addEventListener("change", read);
read();
