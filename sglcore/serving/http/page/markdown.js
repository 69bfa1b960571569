"use strict";
/* Markdown as elements, block by block; what is no markup stays text. */
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/, HEADING = /^(#{1,6})\s+(.*?)(?:\s+#+)?\s*$/, RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/, ITEM = /^( *)([-*+]|\d{1,9}[.)])( +)(?=\S)/, DASHES = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;
const INLINE = /(?<math>\$\$[\s\S]+?\$\$|\\\[[\s\S]+?\\\]|\\\([\s\S]+?\\\)|(?<![\w$\\])\$(?=[^\s$])[^$\n]*(?<=\S)\$(?![\w$]))|(?<!`)(?<ticks>`+)(?!`)(?<code>[\s\S]*?[^`])\k<ticks>(?!`)|\*\*(?<strong>[^\s*](?:[\s\S]*?\S)?)\*\*(?!\*)|(?<![*\w])\*(?<em>[^\s*](?:[^*]*[^\s*])?)\*(?!\*)|(?<!\w)_(?<under>[^\s_](?:[^_]*[^\s_])?)_(?!\w)|~~(?<del>[^~\s](?:[^~]*[^~\s])?)~~|!?\[(?<label>[^\]\n]*)\]\((?<href>(?:[^\s()]|\([^\s()]*\))+)(?: +"[^"]*")?\)|(?<!\w)(?<url>https?:\/\/(?:[^\s<>"'`()[\]]|\([^\s()<>]*\))+(?<![.,;:!?*_~]))|\\(?<plain>[\\`*_~[\]#|>.-])/g;
const DEEPEST = 8, LONGEST = 20000, LONGEST_HEAD = 4000;
function blocksOf(text, depth = 0) {
  const lines = text.split("\n"), found = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) { at += 1; continue; }
    const [next, build] = blockAt(lines, at, depth);
    found.push({ source: lines.slice(at, next).join("\n"), build });
    at = next;
  }
  return found;
}
/* The line behind a block, and what makes its element. */
function blockAt(lines, at, depth) {
  const line = lines[at], fence = FENCE.exec(line), heading = HEADING.exec(line);
  if (fence) return fenced(lines, at, fence);
  if (heading) return [at + 1, () => inline(make(`h${Math.min(heading[1].length + 2, 5)}`), heading[2])];
  if (RULE.test(line)) return [at + 1, () => make("hr")];
  if (depth < DEEPEST && QUOTE.test(line)) return quoted(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return listed(lines, at, depth);
  if (isTable(lines, at)) return tabled(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !begins(lines, end, depth)) end += 1;
  return [end, () => inline(make("p"), lines.slice(at, end).join("\n"))];
}
function begins(lines, at, depth) {
  const line = lines[at], item = ITEM.exec(line);
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || isTable(lines, at)
    || depth < DEEPEST && (QUOTE.test(line) || item !== null && !(/^\d/.test(item[2]) && parseInt(item[2], 10) !== 1));
}
function fenced(lines, at, fence) {
  const close = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !close.test(lines[end])) end += 1;
  return [Math.min(end + 1, lines.length), () => codeBlock(fence[2], lines.slice(at + 1, end).join("\n"))];
}
function codeBlock(language, text) {
  const node = make("div", "code"), bar = make("div", "bar"), pre = make("pre");
  const button = act("Copy", "", () => copy(text, button));
  button.setAttribute("aria-label", "Copy the code");
  bar.append(make("span", "", language || "code"), button);
  pre.append(make("code", "", text));
  node.append(bar, pre);
  return node;
}
function quoted(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map(line => line.replace(QUOTE, "")).join("\n");
  return [end, () => filled(make("blockquote"), blocksOf(inner, depth + 1))];
}
function listed(lines, at, depth) {
  const first = ITEM.exec(lines[at]), isCounted = /\d/.test(first[2]), base = first[1].length, items = [];
  let end = at, width = 0;
  for (; end < lines.length; end += 1) {
    const line = lines[end], item = ITEM.exec(line), indent = line.search(/\S|$/);
    if (item && item[1].length < base + 2 && !RULE.test(line)) {
      if (/\d/.test(item[2]) !== isCounted) break;
      width = item[0].length;
      items.push([line.slice(width)]);
    } else if (!line.trim()) {
      const next = lines[end + 1] || "", after = ITEM.exec(next);
      if (next.search(/\S|$/) < base + 2 && !(after && /\d/.test(after[2]) === isCounted) || !next.trim()) break;
      items.at(-1).push("");
    } else if (indent >= base + 2 || lines[end - 1].trim() && !begins(lines, end, depth)) {
      items.at(-1).push(line.slice(Math.min(indent, width)));
    } else break;
  }
  return [end, () => {
    const list = make(isCounted ? "ol" : "ul");
    if (isCounted) list.start = parseInt(first[2], 10);
    list.append(...items.map(item => listItem(item, depth + 1)));
    return list;
  }];
}
function listItem(lines, depth) {
  const task = /^\[([ xX])\] +/.exec(lines[0]);
  if (task) lines[0] = lines[0].slice(task[0].length);
  const item = filled(make("li", task ? "task" : ""), blocksOf(lines.join("\n"), depth)), first = item.firstElementChild;
  if (first && first.tagName === "P") first.replaceWith(...first.childNodes);
  if (task) item.prepend(task[1] === " " ? "\u2610 " : "\u2611 ");
  return item;
}
function isTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].length < LONGEST_HEAD && lines[at + 1].includes("-") && lines[at + 1].includes("|") && DASHES.test(lines[at + 1]);
}
function tabled(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const sides = cells(lines[at + 1]).map(dash => dash.endsWith(":") ? dash.startsWith(":") ? "center" : "right" : "");
  return [end, () => {
    const node = make("div", "wide"), table = make("table"), head = make("thead"), body = make("tbody");
    head.append(tableRow("th", cells(lines[at]), sides));
    body.append(...lines.slice(at + 2, end).map(line => tableRow("td", cells(line), sides)));
    table.append(head, body);
    node.append(table);
    return node;
  }];
}
function cells(line) { return line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map(cell => cell.trim()); }
function tableRow(tag, texts, sides) {
  const row = make("tr");
  row.append(...sides.map((side, place) => inline(make(tag, side), texts[place] || "")));
  return row;
}
function inline(node, text, depth = 0) {
  let at = 0;
  for (const found of depth < DEEPEST && text.length < LONGEST ? text.matchAll(INLINE) : []) {
    const part = found.groups;
    node.append(text.slice(at, found.index), part.code !== undefined ? make("code", "", part.code) : part.plain || part.math || spanOf(part, found[0], depth));
    at = found.index + found[0].length;
  }
  node.append(text.slice(at));
  return node;
}
function spanOf(part, written, depth) {
  const href = part.href ?? part.url;
  if (href === undefined) {
    const tag = part.strong !== undefined ? "strong" : part.del !== undefined ? "del" : "em";
    return inline(make(tag), part.strong ?? part.del ?? part.em ?? part.under, depth + 1);
  }
  if (!/^(https?|mailto):/i.test(href)) return written;
  const link = part.label ? inline(make("a"), part.label, depth + 1) : make("a", "", href);
  for (const inner of link.querySelectorAll("a")) inner.replaceWith(...inner.childNodes);
  link.href = href;
  link.target = "_blank";
  link.rel = "noopener noreferrer";
  return link;
}
/* Only blocks that are others than before are made again: mostly the last. */
function filled(node, blocks) {
  blocks.forEach((block, place) => {
    const old = node.children[place];
    if (old && old.source === block.source) return;
    const made = block.build();
    made.source = block.source;
    if (old) old.replaceWith(made); else node.append(made);
  });
  while (node.children.length > blocks.length) node.lastElementChild.remove();
  return node;
}
async function copy(text, button) {
  let isCopied = true;
  try { await navigator.clipboard.writeText(text); }
  catch { /* a page that came without TLS from another host has no clipboard but this one */
    const box = make("textarea", "sr");
    box.value = text;
    document.body.append(box);
    box.select();
    isCopied = document.execCommand("copy");
    box.remove();
    button.focus();
  }
  button.textContent = isCopied ? "Copied" : "Not copied";
  say(isCopied ? "copied" : "the browser did not let it be copied");
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}
