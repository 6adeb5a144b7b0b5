const at = id => document.getElementById(id);
// Ask the server, with the key that the person typed; an error is thrown with the server's own words.
async function ask(path, body, signal) {
  const headers = { "content-type": "application/json" };
  if (at("key")) {
    sessionStorage.apiKey = at("key").value;
    headers.authorization = `Bearer ${at("key").value}`;
  }
  const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  throw new Error(said.error?.message || `the server answered with status ${answer.status}`);
}
function say(words, wrong = false) {
  at("said").textContent = words;
  at("said").classList.toggle("wrong", wrong);
}
if (at("key")) at("key").value = sessionStorage.apiKey || "";
