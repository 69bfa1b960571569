"use strict";
/* What outlives the page: conversations and settings in this browser, the key and the draft in this tab. */
const CHAT = "sglcore-chat-", CHATS = "sglcore-chats", COMPLETIONS = "sglcore-completions", SETTINGS = "sglcore-settings";
const CURRENT = "sglcore-current", DRAFT = "sglcore-draft", KEPT_COMPLETIONS = 50;
const FIELDS = ["temperature", "max_tokens", "top_p", "top_k", "min_p", "seed", "schema", "tools"];

function stored(name) {
  try { return JSON.parse(localStorage.getItem(name)); } catch { return null; }
}
/* False where the browser has no room, or gives none. */
function store(name, value) {
  try {
    if (value === null) localStorage.removeItem(name); else localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch { return false; }
}
function freshName() { return `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`; }

/* The known conversations: name -> {title, at}. */
function known() {
  const found = stored(CHATS);
  return found && typeof found === "object" && !Array.isArray(found) ? found : {};
}
function titleOf(turns) {
  const first = turns.find(turn => turn.role === "user");
  return first ? first.content.trim().replace(/\s+/g, " ").slice(0, 80) : "without a message";
}
function record() { return { system: $("system").value, turns: view.turns.map(turn => turn.record()) }; }
/* What was said is kept at once; where there is no room, that is said, and it ends with the page. */
function save() {
  if (view.turns.length) keep(view.chat, record());
  else if (known()[view.chat]) drop(view.chat);
}
function keep(name, what) {
  const isKept = store(CHAT + name, what) && store(CHATS, { ...known(), [name]: { title: titleOf(what.turns), at: Date.now() } });
  if (!isKept) notice("This browser has no room left: what is said now ends with this tab. Deleting conversations makes room.");
  listChats();
}
function drop(name) {
  const { [name]: gone, ...others } = known();
  store(CHAT + name, null);
  store(CHATS, Object.keys(others).length ? others : null);
  listChats();
}
function saveCompletions() {
  store(COMPLETIONS, view.completions.length ? view.completions.slice(-KEPT_COMPLETIONS).map(each => each.record()) : null);
}
function saveSettings() {
  const found = Object.fromEntries(FIELDS.map(name => [name, $(name).value]).filter(([, value]) => value));
  const system = $("system").value;
  store(SETTINGS, Object.keys(found).length || system ? { ...found, ...(system ? { system } : {}) } : null);
  $("reset").hidden = !Object.keys(found).length && !system;
}
function restoreSettings() {
  const found = stored(SETTINGS) || {};
  for (const name of [...FIELDS, "system"]) if (typeof found[name] === "string") $(name).value = found[name];
  saveSettings();
}
function resetSettings() {
  for (const name of [...FIELDS, "system"]) $(name).value = "";
  for (const name of ["schema", "tools"]) { $(`${name}-wrong`).textContent = ""; $(name).removeAttribute("aria-invalid"); }
  saveSettings();
  if (view.turns.length) save();
}

/* Puts a conversation on the screen. What is damaged stays where it is, under its own name. */
function showChat(name, what) {
  view.chat = name;
  sessionStorage.setItem(CURRENT, name);
  for (const turn of view.turns.splice(0)) turn.node.remove();
  try { if (what) fill(what); }
  catch (error) {
    for (const turn of view.turns.splice(0)) turn.node.remove();
    $("chat-turns").replaceChildren();
    notice("A saved conversation can not be read; this is a new one.");
    showChat(freshName(), null);
  }
  listChats();
  refresh();
  follow(true);
}
function fill(what) {
  const list = listFor("chat");
  for (const turn of what.turns) view.turns.push(restored(list, turn));
  $("system").value = what.system || "";
  saveSettings();
  const [before, last] = view.turns.slice(-2);
  if (last instanceof Answer) last.askResults(sendResults);
  if (last instanceof Answer && before instanceof Question) before.unanswered = last.wire().length === 0;
}
function restored(list, turn) {
  if (typeof turn.content !== "string") throw new TypeError("found a turn without a text");
  return (turn.role === "user" ? Question : Answer).restored(list, turn);
}
function restore() {
  restoreSettings();
  const name = sessionStorage.getItem(CURRENT);
  showChat(name || freshName(), name ? stored(CHAT + name) : null);
  const texts = stored(COMPLETIONS);
  try { for (const each of Array.isArray(texts) ? texts : []) view.completions.push(restored(listFor("complete"), each)); }
  catch { listFor("complete").replaceChildren(); view.completions = []; }
  $("prompt").value = sessionStorage.getItem(DRAFT) || "";
}
function newChat() {
  stop();
  if (view.turns.length) save();
  clearNotice();
  showChat(freshName(), null);
  show("chat");
  $("prompt").focus();
}
function openChat(name) {
  if (name !== view.chat) {
    stop();
    if (view.turns.length) save();
    clearNotice();
    showChat(name, stored(CHAT + name));
  }
  show("chat");
}
function deleteChat(name) {
  const what = name === view.chat ? record() : stored(CHAT + name);
  if (name === view.chat) { stop(); showChat(freshName(), null); }
  drop(name);
  $("new").focus();
  notice("The conversation is deleted.", () => { keep(name, what); showChat(name, what); });
}
function listChats() {
  const found = Object.entries(known()).sort(([, one], [, other]) => other.at - one.at);
  $("chats-part").hidden = !found.length || view.mode !== "chat" || !view.generates;
  const shown = found.map(([name, { title }]) => `${name === view.chat}${name}${title}`).join("\n");
  if (listChats.shown === shown) return;
  listChats.shown = shown;
  $("chats").replaceChildren(...found.map(([name, { title }]) => chatRow(name, String(title))));
}
function chatRow(name, title) {
  const row = make("li"), open = act(title, "open", () => openChat(name)), gone = act("\u00d7", "gone", () => deleteChat(name));
  open.title = title;
  open.dir = "auto";
  if (name === view.chat) open.setAttribute("aria-current", "true");
  gone.setAttribute("aria-label", `Delete ${title}`);
  row.append(open, gone);
  return row;
}
/* Another tab has written: its list is ours, and so is the conversation if nothing is on its way here. */
function written(event) {
  if (event.key === CHATS || event.key === null) listChats();
  if (event.key === CHAT + view.chat && event.newValue && !view.running) showChat(view.chat, stored(event.key));
}

/* A line above the box where messages are written, until something else happens; with `undo`, a way back. */
function notice(text, undo) {
  const box = $("notice");
  box.replaceChildren(make("span", "", text));
  if (undo) box.append(act("Undo", "link", () => { clearNotice(); undo(); say("undone"); }));
  box.hidden = false;
  say(text);
}
function clearNotice() { $("notice").hidden = true; }
/* The way back to what is on the screen now. */
function wayBack() {
  const name = view.chat, what = record();
  return () => { stop(); showChat(name, what); save(); };
}
