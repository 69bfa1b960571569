"use strict";
/* What every part uses, and how the server is asked. */
const $ = id => document.getElementById(id);
const KEY = "sglcore-key", NO_CONNECTION = "There is no connection to the server; it may have stopped.";
const view = { mode: "chat", ready: false, generates: true, running: null, info: null, chat: "", turns: [], completions: [], samples: [] };
const DIRECTED = new Set(["p", "ul", "ol", "h3", "h4", "h5", "th", "td", "blockquote", "textarea"]);

/* Elements are made here and nowhere else; text goes in as text, and runs in the direction of its own script. */
function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  if (DIRECTED.has(tag)) node.dir = "auto";
  return node;
}
function act(label, name, onclick) {
  const button = make("button", name, label);
  button.type = "button";
  button.onclick = onclick;
  return button;
}
function number(value, digits = 0) {
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}
function seconds(ms) { return ms < 1000 ? `${number(ms)} ms` : `${number(ms / 1000, 2)} s`; }

class Refused extends Error {
  constructor(status, error) {
    super(error.message || `the server answered ${status}`);
    this.status = status;
    this.kind = [error.type, error.code, error.param && `in ${error.param}`].filter(Boolean).join(", ");
  }
}
function headers() {
  const key = sessionStorage.getItem(KEY);
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}
async function refusal(response) {
  const text = await response.text();
  try { return new Refused(response.status, JSON.parse(text).error || {}); }
  catch { return new Refused(response.status, { message: text.slice(0, 400) || `the server answered ${response.status}` }); }
}
async function getJSON(path) {
  const response = await connected(fetch(path, { headers: headers(), cache: "no-store" }), NO_CONNECTION);
  if (!response.ok) throw await refusal(response);
  return response.json();
}
/* Server-sent events from text that may be split anywhere, also between \r and \n. */
function eventReader(onData) {
  let rest = "", data = [];
  return text => {
    rest += text;
    const held = rest.endsWith("\r") ? 1 : 0;
    const lines = rest.slice(0, rest.length - held).split(/\r\n|\n|\r/);
    rest = lines.pop() + rest.slice(rest.length - held);
    for (const line of lines) {
      if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
      else if (line === "" && data.length) { onData(data.join("\n")); data = []; }
    }
  };
}
/* Seeds have 64 bits: they go in and out as digits, never as a number. */
function withSeed(body, seed) {
  const text = JSON.stringify(body);
  return seed ? `{"seed":${seed},${text.slice(1)}` : text;
}
function seedOf(data) {
  const found = /(?<!\\)"seed_used":\s*(\d+)/.exec(data);
  return found ? found[1] : "";
}
/* A browser says of a connection that fails no more than that, each in its own words. */
async function connected(promise, words) {
  try { return await promise; }
  catch (error) { throw error instanceof TypeError ? new Refused(0, { message: words }) : error; }
}
async function stream(path, text, signal, onChunk, onWarning) {
  const response = await connected(fetch(path, { method: "POST", headers: headers(), body: text, signal }), NO_CONNECTION);
  const warnings = response.headers.get("x-sglcore-warnings");
  if (warnings) onWarning(warnings);
  if (!response.ok) throw await refusal(response);
  let done = false;
  const read = eventReader(data => {
    if (data === "[DONE]") { done = true; return; }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(response.status, chunk.error);
    onChunk(chunk, data);
  });
  const reader = response.body.getReader(), decoder = new TextDecoder();
  for (;;) {
    const part = await connected(reader.read(), "The connection broke before the answer was whole.");
    read(part.done ? decoder.decode() : decoder.decode(part.value, { stream: true }));
    if (part.done) break;
  }
  if (!done) throw new Refused(response.status, { message: "the connection ended before the answer did" });
}
