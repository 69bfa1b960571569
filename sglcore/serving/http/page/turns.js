"use strict";
/* Questions and answers on the screen, and what is kept and sent of them. */

/* One question. Without an answer it is no part of what is sent later. */
class Question {
  constructor(list, text, unanswered = false) {
    this.content = text;
    this.node = make("article", "turn user");
    this.node.setAttribute("aria-label", "You");
    this.body = make("div", "body", text);
    this.body.dir = "auto";
    this.meta = make("div", "meta");
    const button = act("Copy", "", () => copy(this.content, button));
    this.button = act("Edit", "", () => edit(this));
    this.meta.append(make("span", "why", "unanswered, so it is not sent along"), acts(this.button, button, act("Delete", "", () => forget(this))));
    this.node.append(make("div", "who", "You"), this.body, this.meta);
    list.append(this.node);
    this.unanswered = unanswered;
  }
  get unanswered() { return this.node.classList.contains("unanswered"); }
  set unanswered(value) { this.node.classList.toggle("unanswered", value); }
  wire() { return this.unanswered ? [] : [{ role: "user", content: this.content }]; }
  record() { return { role: "user", content: this.content, unanswered: this.unanswered }; }
  static restored(list, known) { return new Question(list, known.content, Boolean(known.unanswered)); }
}

/* One answer: of a chat, or of a text that was `given`. What is plain is no Markdown: such a text, and JSON. */
class Answer {
  constructor(list, who, isPlain, given) {
    this.node = make("article", "turn assistant busy");
    this.node.setAttribute("aria-label", who);
    this.node.append(make("div", "who", who));
    this.body = make("div", isPlain ? "body" : "body marked");
    if (given) this.body.append(make("span", "given", given));
    if (isPlain) { this.body.append(this.text = document.createTextNode("")); this.body.dir = "auto"; }
    this.meta = make("div", "meta");
    this.node.append(this.body, this.meta);
    list.append(this.node);
    Object.assign(this, { who, isPlain, given, content: "", reasoning: "", calls: [], notes: [], words: [], seed: "", usage: null, reason: null, outcome: "", hasFailed: false, pieces: 0, begin: performance.now(), first: 0, last: 0, cost: 0 });
  }
  get isChat() { return this.given === undefined; }
  get isEmpty() { return !this.content && !this.calls.length; }
  get isBusy() { return this.node.classList.contains("busy"); }
  wire() {
    if (this.isEmpty && (this.hasFailed || this.outcome)) return [];
    const wire = { role: "assistant", content: this.content || (this.calls.length ? null : "") };
    if (!this.calls.length) return [wire];
    wire.tool_calls = this.calls.map(call => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
    return [wire, ...this.calls.map(call => ({ role: "tool", tool_call_id: call.id, content: call.result || "" }))];
  }
  record() {
    const { who, isPlain, given, content, reasoning, notes, words, seed, reason, hasFailed } = this;
    const outcome = this.outcome || (this.isBusy ? "stopped" : "");
    const calls = this.calls.filter(Boolean).map(call => ({ id: call.id, name: call.name, arguments: call.arguments, result: call.result }));
    return { role: "assistant", who, isPlain, given, content, reasoning, calls, notes, words, seed, reason, outcome, hasFailed };
  }
  static restored(list, known) {
    const answer = new Answer(list, known.who, known.isPlain, known.given);
    if (known.reasoning) answer.think(known.reasoning);
    known.calls.forEach((call, index) => {
      answer.call({ index, id: call.id, function: call });
      answer.calls[index].result = call.result;
    });
    for (const [text, kind, more] of known.notes) answer.note(text, kind, more);
    Object.assign(answer, { content: known.content, words: known.words, seed: known.seed, reason: known.reason, hasFailed: known.hasFailed });
    answer.end(known.outcome);
    return answer;
  }
  arrived() {
    this.last = performance.now();
    if (!this.pieces) this.first = this.last;
    this.pieces += 1;
  }
  take(chunk, data) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices && chunk.choices[0];
    if (!choice) return;
    this.seed = seedOf(data) || this.seed;
    const delta = choice.delta || { content: choice.text };
    if (delta.content || delta.reasoning_content || delta.tool_calls) this.arrived();
    if (delta.reasoning_content) this.think(delta.reasoning_content);
    if (delta.content) { this.content += delta.content; this.plan(); }
    for (const part of delta.tool_calls || []) this.call(part);
    if (choice.finish_reason) this.reason = choice.finish_reason;
    if (this.pieces) this.figures();
  }
  /* A text that takes long to draw is drawn less often. */
  plan() {
    this.planned ||= setTimeout(() => { this.draw(); follow(false); }, Math.max(16, 4 * this.cost));
  }
  draw() {
    clearTimeout(this.planned);
    this.planned = 0;
    const begin = performance.now();
    if (this.isPlain) this.text.appendData(this.content.slice(this.text.length));
    else filled(this.body, blocksOf(this.content));
    this.cost = performance.now() - begin;
  }
  think(text) {
    if (!this.thought) {
      this.thought = make("details", "thought");
      this.thoughtText = make("p");
      this.thought.append(make("summary", "", "Reasoning"), this.thoughtText);
      this.node.insertBefore(this.thought, this.body);
    }
    this.reasoning += text;
    this.thoughtText.append(text);
  }
  call(part) {
    let call = this.calls[part.index];
    if (!call) {
      call = this.calls[part.index] = { id: part.id || "", name: "", arguments: "", result: "", card: make("div", "call") };
      call.title = make("b");
      call.shown = make("pre");
      call.card.append("calls ", call.title, call.shown);
      this.node.insertBefore(call.card, this.meta);
    }
    const made = part.function || {};
    call.id = part.id || call.id;
    call.name += made.name || "";
    call.arguments += made.arguments || "";
    call.title.textContent = call.name;
    call.shown.textContent = call.arguments;
  }
  figures() {
    const tokens = this.usage ? this.usage.completion_tokens : this.pieces;
    const about = this.usage ? "" : "about ";
    const span = this.last - this.first;
    const words = [];
    if (this.pieces) words.push(`first token after ${seconds(this.first - this.begin)}`);
    if (tokens > 1 && span > 0) words.push(`${about}${number((tokens - 1) / span * 1000, span > 10 * tokens ? 1 : 0)} tokens/s`);
    words.push(`${about}${number(tokens)} ${tokens === 1 ? "token" : "tokens"}`);
    const cached = this.usage && this.usage.prompt_tokens_details && this.usage.prompt_tokens_details.cached_tokens;
    if (this.usage) words.push(`prompt of ${number(this.usage.prompt_tokens)}${cached ? `, ${number(cached)} from cache` : ""}`);
    const right = this.usage && this.usage.completion_tokens_details && this.usage.completion_tokens_details.accepted_prediction_tokens;
    if (right && tokens > right + 1) words.push(`${number((tokens - 1) / (tokens - 1 - right), 1)} tokens a step`);
    this.words = words;
    this.meta.replaceChildren(...words.map(word => make("span", "", word)));
  }
  end(outcome) {
    this.node.classList.remove("busy");
    this.outcome = outcome;
    this.calls = this.calls.filter(Boolean);
    if (this.pieces || this.usage) this.figures();
    else this.meta.replaceChildren(...this.words.map(word => make("span", "", word)));
    if (this.reason === "length") this.meta.append(make("span", "", "ended by the token limit"));
    if (outcome) this.meta.append(make("span", "", outcome));
    for (const call of this.calls) { call.shown.textContent = pretty(call.arguments); }
    this.draw();
    const made = [], button = act("Copy", "", () => copy(this.content, button));
    if (this.seed) made.push(seedButton(this.seed));
    if (this.content) made.push(button);
    if (this.isChat) made.push(act(this.isEmpty && (this.hasFailed || outcome) ? "Retry" : "Regenerate", "again", () => again(this)));
    else made.push(act("Begin again", "", () => beginAgain(this.given)));
    this.meta.append(acts(...made));
  }
  note(text, kind, more) {
    this.notes.push([text, kind, more]);
    this.hasFailed ||= kind === "bad";
    const node = make("div", `note ${kind || ""}`, text);
    if (kind) node.setAttribute("role", "alert");
    if (more) node.append(make("small", "", ` (${more})`));
    this.node.insertBefore(node, this.meta);
  }
  /* Each call gets a box for what it returned; with all of them the model goes on. */
  askResults(onSend) {
    if (!this.calls.length || this.reason !== "tool_calls") return;
    for (const call of this.calls) {
      const label = make("label", "", `Result of ${call.name}`), box = make("textarea", "code");
      box.rows = 1;
      box.value = call.result;
      label.append(box);
      call.card.append(label);
      box.oninput = () => { call.result = box.value; save(); };
    }
    const button = act("Send the results", "main", () => onSend(button));
    this.node.insertBefore(button, this.meta);
  }
}
function acts(...buttons) {
  const node = make("span", "acts");
  node.append(...buttons);
  return node;
}
function seedButton(seed) {
  const button = act("Keep the seed", "", () => { $("seed").value = seed; saveSettings(); notice(`The next answers are drawn with the seed ${seed}.`); });
  button.title = `The seed of this answer: ${seed}`;
  return button;
}
function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}
