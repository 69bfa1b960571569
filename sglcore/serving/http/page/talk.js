"use strict";
/* What is asked, and sending, stopping, editing. */
function listFor(mode) { return $(mode === "chat" ? "chat-turns" : "complete-turns"); }
function jsonField(id, check) {
  const text = $(id).value.trim(), wrong = $(`${id}-wrong`);
  let value, problem = "";
  if (text) {
    try { value = JSON.parse(text); problem = check(value); } catch (error) { problem = `not JSON: ${error.message}`; }
  }
  wrong.textContent = problem;
  $(id).setAttribute("aria-invalid", String(Boolean(problem)));
  if (problem) amiss(id, problem);
  return value;
}
function amiss(id, problem) {
  show("settings");
  $(id).focus();
  throw new Error(problem);
}
function settings() {
  const body = { model: view.info ? view.info.served_model_names[0] : "", stream: true, stream_options: { include_usage: true } };
  for (const id of ["temperature", "max_tokens", "top_p", "top_k", "min_p"]) {
    if ($(id).validity.badInput) amiss(id, `${$(id).labels[0].firstChild.textContent} is not a number`);
    if ($(id).value !== "") body[id] = Number($(id).value);
  }
  const schema = jsonField("schema", value => value !== null && typeof value === "object" ? "" : "found no object, wanted a JSON schema");
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  if (view.mode === "complete") return body;
  const tools = jsonField("tools", value => Array.isArray(value) ? "" : "found no list, wanted a list of tools");
  if (tools && tools.length) body.tools = tools;
  return body;
}
function seedAsked() {
  const text = $("seed").value.trim();
  if (text && !/^\d+$/.test(text)) amiss("seed", `the seed is ${text}; wanted digits`);
  return text;
}
function wireMessages() {
  const system = $("system").value.trim();
  return [...(system ? [{ role: "system", content: system }] : []), ...view.turns.flatMap(turn => turn.wire())];
}
/* The settings and the seed; null, and said, if they are not what they should be, or nothing can be asked now. */
function asked() {
  if (view.running) return null;
  if (!view.ready) { notice("The server is not ready. The message stays here."); return null; }
  try { return [settings(), seedAsked()]; } catch (error) { notice(`Not sent: ${error.message}`); return null; }
}
async function send() {
  const text = $("prompt").value, given = text.trim() && asked();
  if (!given) return;
  clearNotice();
  $("prompt").value = "";
  fit();
  if (view.mode === "chat") await ask(text, ...given);
  else await complete(text, ...given);
}
async function ask(text, body, seed) {
  view.turns.push(new Question(listFor("chat"), text));
  await answerChat(body, seed);
}
async function complete(text, body, seed) {
  const answer = new Answer(listFor("complete"), "Completion", true, text);
  view.completions.push(answer);
  await run("/v1/completions", { ...body, prompt: text }, seed, answer);
  saveCompletions();
}
async function answerChat(body, seed) {
  const before = view.turns.at(-1), messages = wireMessages();
  const answer = new Answer(listFor("chat"), view.info ? view.info.served_model_names[0] : "Assistant", Boolean(body.response_format));
  view.turns.push(answer);
  save();
  await run("/v1/chat/completions", { ...body, messages }, seed, answer);
  if (!view.turns.includes(answer)) return;
  if (before instanceof Question) before.unanswered = answer.wire().length === 0;
  answer.askResults(sendResults);
  save();
  follow(false);
}
async function sendResults(button) {
  const given = asked();
  if (!given) return;
  button.remove();
  await answerChat(...given);
}
function cut(place, count = Infinity) {
  for (const turn of view.turns.splice(place, count)) turn.node.remove();
  save();
  refresh();
}
/* The answer once more, without what came after it. */
async function again(answer) {
  const given = asked();
  if (!given) return;
  const back = wayBack();
  if (!answer.isEmpty) notice("The answer is replaced.", back); else clearNotice();
  cut(view.turns.indexOf(answer));
  const before = view.turns.at(-1);
  if (before instanceof Question) before.unanswered = false;
  await answerChat(...given);
}
/* A question without its answers. */
function forget(question) {
  if (view.running) return;
  const back = wayBack(), place = view.turns.indexOf(question);
  const next = view.turns.slice(place + 1).findIndex(turn => turn instanceof Question);
  cut(place, next < 0 ? Infinity : next + 1);
  notice("The message is deleted.", back);
  $("prompt").focus();
}
/* A question in other words: it is asked again, and what came after it goes. */
function edit(question) {
  if (view.running || !question.body.isConnected) return;
  const box = make("textarea"), meta = make("div", "meta");
  const close = () => { box.replaceWith(question.body); meta.replaceWith(question.meta); question.button.focus(); };
  const renew = async () => {
    const given = box.value.trim() && asked();
    if (!given) return;
    notice("The message is replaced.", wayBack());
    cut(view.turns.indexOf(question));
    await ask(box.value, ...given);
  };
  box.value = question.content;
  box.rows = Math.min(question.content.split("\n").length + 1, 12);
  box.setAttribute("aria-label", "The message in other words");
  box.onkeydown = event => {
    if (isSend(event)) { event.preventDefault(); renew(); }
    if (event.key === "Escape") { event.stopPropagation(); close(); }
  };
  meta.append(acts(act("Send", "", renew), act("Cancel", "", close)));
  question.body.replaceWith(box);
  question.meta.replaceWith(meta);
  box.focus();
  box.setSelectionRange(box.value.length, box.value.length);
}
function isSend(event) { return event.key === "Enter" && !event.shiftKey && !event.isComposing; }
function beginAgain(text) {
  $("prompt").value = text;
  fit();
  $("prompt").focus();
}
/* The last thing that was written, for an empty box. */
function lastWritten() {
  if (view.mode === "complete") beginAgain(view.completions.at(-1)?.given || "");
  else { const last = view.turns.findLast(turn => turn instanceof Question); if (last) edit(last); }
}
async function run(path, body, seed, answer) {
  const control = new AbortController();
  view.running = control;
  refresh();
  follow(true);
  let outcome = "";
  try {
    await stream(path, withSeed(body, seed), control.signal, (chunk, data) => { answer.take(chunk, data); follow(false); },
      warning => answer.note(warning));
  } catch (error) {
    if (control.signal.aborted) outcome = "stopped";
    else answer.note(error.message, "bad", error.kind);
  }
  answer.end(outcome);
  if (view.running === control) view.running = null;
  refresh();
  follow(false);
  say(outcome || (answer.hasFailed ? "no answer" : "answer complete"));
  takeFocus();
}
/* Where words are typed next, unless somebody is at something else. */
function takeFocus() {
  const at = document.activeElement, isFree = !at || at === document.body || at.offsetParent === null || $("composer").contains(at);
  if (isFree && !matchMedia("(pointer: coarse)").matches) $("prompt").focus();
}
function stop() {
  if (view.running) view.running.abort();
  view.running = null;
}
function clear() {
  if (view.mode === "chat") { newChat(); return; }
  stop();
  const texts = view.completions.splice(0);
  listFor("complete").replaceChildren();
  saveCompletions();
  refresh();
  notice("The completions are deleted.", () => {
    view.completions.unshift(...texts);
    listFor("complete").prepend(...texts.map(each => each.node));
    saveCompletions();
    refresh();
  });
  $("prompt").focus();
}
/* Said once more even if it is what was said last. */
function say(text) {
  $("said").textContent = "";
  requestAnimationFrame(() => { $("said").textContent = text; });
}

/* The end of the text stays in sight, unless somebody has scrolled away from it. */
const end = { isFollowed: true, isPlanned: false };
function lookAtScroll() {
  const box = $("scroll"), below = box.scrollHeight - box.scrollTop - box.clientHeight;
  end.isFollowed = below < 60;
  $("latest").hidden = below < 200;
}
function follow(force) {
  if (force) end.isFollowed = true;
  if (end.isPlanned) return;
  end.isPlanned = true;
  requestAnimationFrame(() => {
    end.isPlanned = false;
    if (end.isFollowed) $("scroll").scrollTop = $("scroll").scrollHeight;
    lookAtScroll();
  });
}
function fit() {
  const box = $("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}
