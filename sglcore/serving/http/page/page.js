"use strict";
/* What is shown: the views, the start, the server's state; and what every key and button does. */
const VIEWS = ["chat", "complete", "model", "settings", "server"];
const ENDINGS = { draining: "The server is stopping", dead: "The engine has died" };

function show(name) {
  const talk = ["chat", "complete", "model"].includes(name);
  if (talk && name !== "model" && !view.running) view.mode = name;
  document.body.dataset.view = talk ? "talk" : name;
  refresh();
  charts.forEach(draw);
}
function refresh() {
  const place = document.body.dataset.view, mode = view.mode, busy = Boolean(view.running);
  for (const name of ["chat", "complete"]) $(`show-${name}`).setAttribute("aria-pressed", String(mode === name && (place === "talk" || wide.matches)));
  for (const name of ["settings", "server"]) $(`show-${name}`).setAttribute("aria-pressed", String(place === name));
  $("show-model").setAttribute("aria-pressed", String(place === "talk"));
  $("chat-turns").hidden = mode !== "chat";
  $("complete-turns").hidden = mode !== "complete";
  for (const node of document.querySelectorAll(".for-text")) node.hidden = !view.generates;
  for (const node of document.querySelectorAll(".for-vectors")) node.hidden = view.generates;
  for (const node of document.querySelectorAll(".for-chat")) node.hidden = !view.generates || mode !== "chat";
  document.body.dataset.kind = view.generates ? "text" : "vectors";
  const words = mode === "chat" ? "Message" : "Text to complete", isEmpty = !listFor(mode).childElementCount;
  $("prompt").placeholder = words;
  $("prompt").setAttribute("aria-label", words);
  $("loading").hidden = view.ready;
  $("loading").classList.toggle("below", !isEmpty);
  $("empty").hidden = !view.ready || !isEmpty && view.generates;
  if (!$("empty").hidden) showEmpty();
  $("clear").hidden = isEmpty;
  $("clear").textContent = mode === "chat" ? "New chat" : "Clear";
  $("composer").hidden = !view.generates;
  $("send").disabled = !view.ready || busy;
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  listChats();
}
function showEmpty() {
  const kind = view.generates ? view.mode : view.info.limits.num_labels ? "labels" : "vectors";
  if ($("empty").dataset.kind === kind) return;
  $("empty").dataset.kind = kind;
  const [head, text, path, body] = {
    chat: ["Ask something", "Conversations stay in this browser."],
    complete: ["Begin a text", "The model goes on where yours ends."],
    vectors: ["This model generates no text", "It makes vectors of texts:", "/v1/embeddings", { input: ["one text", "another"] }],
    labels: ["This model generates no text", "It scores texts, by /classify, /v1/score and /v1/rerank:", "/v1/score", { text_1: "a question", text_2: ["one answer", "another"] }],
  }[kind];
  $("empty").replaceChildren(make("strong", "", head), make("p", "", text));
  if (path) $("empty").append(codeBlock("curl", example(path, { model: view.info.served_model_names[0], ...body })));
}
/* A command of the shell, in which a name may have any quotes. */
function example(path, body) {
  const key = sessionStorage.getItem(KEY) ? " -H \"authorization: Bearer $KEY\"" : "";
  return `curl ${location.origin}${path}${key} \\\n  -H 'content-type: application/json' \\\n  -d '${JSON.stringify(body).replaceAll("'", "'\\''")}'`;
}
const wide = matchMedia("(min-width: 1180px)");
wide.addEventListener("change", refresh);
function state(kind, text) {
  $("state").dataset.is = kind;
  if ($("state").textContent !== text) $("state").textContent = text;
}

/* Starting: the phase until the server is up, then the figures every second. */
async function watch() {
  clearTimeout(watch.next);
  let pause = 500;
  try { pause = view.ready ? await lookAtStats() : await lookAtStart(); }
  catch (error) { pause = unreachable(error); }
  watch.next = setTimeout(watch, pause);
}
async function lookAtStart() {
  const response = await connected(fetch("/readyz", { cache: "no-store" }), NO_CONNECTION);
  if (response.status !== 200) {
    loading(await response.json());
    return 500;
  }
  const info = await getJSON("/server_info");
  view.generates = !info.limits || info.limits.generates !== false;
  showInfo(info);
  view.ready = true;
  $("key-form").hidden = true;
  state("ready", "ready");
  refresh();
  takeFocus();
  return 0;
}
function loading(startup) {
  const ending = ENDINGS[startup.phase];
  const count = startup.total > 9999 ? `, ${number(startup.done / startup.total * 100)} %` : startup.total > 1 ? `, ${startup.done} of ${startup.total}` : "";
  const elapsed = startup.elapsed_s !== undefined ? `, ${number(startup.elapsed_s, 1)} s` : "";
  const phase = `${String(startup.phase).replaceAll("_", " ")}${count}${elapsed}`;
  const words = startup.phase === "dead" ? `${startup.reason ? `${startup.reason}. ` : ""}Its log says more; start the server again.` : "What runs is answered; nothing new is taken.";
  trouble(ending || "The model is loading", ending ? words : phase);
  $("bar").hidden = Boolean(ending);
  if (startup.total > 0) { $("bar").max = startup.total; $("bar").value = startup.done; } else $("bar").removeAttribute("value");
  state(startup.phase === "dead" ? "down" : "loading", ending ? startup.phase : "loading");
}
/* What stands where the model can not be talked to, below what was said so far. */
function trouble(head, text) {
  const isNew = $("loading-head").textContent !== head;
  $("loading-head").textContent = head;
  $("loading-text").textContent = text;
  $("bar").hidden = true;
  $("key-form").hidden = true;
  refresh();
  if (isNew) follow(false);
}
async function lookAtStats() {
  const stats = await getJSON("/server_info/stats");
  sample(stats);
  if (stats.replicas.length && !stats.replicas.some(one => one.state === "ready")) {
    view.ready = false;
    refresh();
    return 0;
  }
  state("ready", "ready");
  return 1000;
}
function unreachable(error) {
  if (!(error instanceof Refused)) console.error(error);
  if (error.status === 429) return 1000;
  view.ready = false;
  if (error.status === 401) {
    const isWrong = Boolean(sessionStorage.getItem(KEY));
    state("down", isWrong ? "wrong API key" : "API key needed");
    trouble(isWrong ? "This API key is not known here" : "This server wants an API key", error.message);
    $("key-form").hidden = false;
    return 1000;
  }
  state("down", error.status ? `status ${error.status}` : error instanceof Refused ? "no connection" : "error");
  trouble("The server does not answer", `${error.message} Trying again every second.`);
  return 1000;
}
function showInfo(info) {
  view.info = info;
  const name = info.served_model_names[0];
  document.title = `${name} · sglcore`;
  $("model").textContent = name;
  $("model").title = String(info.model || name);
  const facts = [["Version", info.version], ["Device", info.device], ["", info.device_evidence], ["Context", `${number(info.max_model_len)} tokens`], ["OpenAI base URL", `${location.origin}/v1`]];
  const lines = facts.filter(([, value]) => value).flatMap(([what, value]) => [make("b", "", what ? `${what} ` : ""), String(value), make("br")]);
  $("facts").replaceChildren(...lines);
  $("rows").replaceChildren(...(info.ledger || []).map(ledgerRow));
}
function ledgerRow(row) {
  const line = make("tr"), chosen = make("td", "", row.effective), why = make("td", "", row.reason);
  if (row.downgrade) chosen.append(make("span", "less", `less than asked: ${row.requested}`));
  if (row.remedy) why.append(make("small", "", `otherwise: ${row.remedy}`));
  line.append(make("td", "", row.topic), chosen, why);
  return line;
}
function takeKey(text) {
  const key = text.trim();
  if (key) sessionStorage.setItem(KEY, key); else sessionStorage.removeItem(KEY);
  $("key").value = key;
}

for (const name of VIEWS) $(`show-${name}`).onclick = () => show(name);
for (const name of [...FIELDS, "system"]) $(name).addEventListener("input", saveSettings);
$("composer").addEventListener("submit", event => { event.preventDefault(); send(); });
$("key-form").addEventListener("submit", event => { event.preventDefault(); takeKey($("key-asked").value); $("key-asked").value = ""; watch(); });
$("key").addEventListener("input", () => takeKey($("key").value));
$("stop").onclick = stop;
$("clear").onclick = clear;
$("new").onclick = newChat;
$("reset").onclick = resetSettings;
$("latest").onclick = () => { follow(true); $("prompt").focus(); };
$("scroll").addEventListener("scroll", lookAtScroll, { passive: true });
$("prompt").addEventListener("input", fit);
$("prompt").addEventListener("keydown", event => {
  if (isSend(event)) { event.preventDefault(); send(); }
  if (event.key === "ArrowUp" && !$("prompt").value) { event.preventDefault(); lastWritten(); }
});
$("system").addEventListener("input", () => { if (view.turns.length) save(); });
document.addEventListener("keydown", event => { if (event.key === "Escape") stop(); });
addEventListener("pagehide", () => {
  if ($("prompt").value) sessionStorage.setItem(DRAFT, $("prompt").value); else sessionStorage.removeItem(DRAFT);
  if (!view.running) return;
  stop();
  save();
  saveCompletions();
});
addEventListener("storage", written);
addEventListener("resize", () => charts.forEach(draw));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach(draw));
$("key").value = sessionStorage.getItem(KEY) || "";
buildCharts();
restore();
fit();
watch();
