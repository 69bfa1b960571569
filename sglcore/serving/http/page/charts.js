"use strict";
/* Charts: the last two minutes, one sample a second. */
const HISTORY = 120;
const charts = [
  { id: "speed", name: "Tokens/s", lines: [s => s.speed], top: 10, now: s => [s.speed === null ? "–" : number(s.speed, s.speed < 100 ? 1 : 0), ""],
    foot: s => `${number(s.total)} generated${s.length ? `, ${number(s.length, 1)} a step and request` : ""}` },
  { id: "load", name: "Requests", lines: [s => s.running, s => s.waiting], top: 4, now: s => [number(s.running), " running"], foot: s => `${number(s.waiting)} waiting`, dots: true },
  { id: "kv", name: "KV cache", lines: [s => s.kv * 100], top: 5, now: s => [number(s.kv * 100, 1), " %"],
    foot: s => `of pages in use${s.rows === null ? "" : `; ${number(s.rows * 100)} % of rows read were on the device`}` },
  { id: "hits", name: "Prefix hits", lines: [s => s.hits === null ? null : s.hits * 100], top: 100, now: s => [s.hits === null ? "–" : number(s.hits * 100), s.hits === null ? "" : " %"],
    foot: s => s.looked ? `${number(s.allHits * 100)} % since the start` : "no prompts yet" },
];
function buildCharts() {
  for (const chart of charts) {
    const card = make("div", "chart"), name = make("div", "name", chart.name);
    chart.value = make("div", "now", "–");
    chart.canvas = make("canvas");
    chart.canvas.id = `chart-${chart.id}`;
    chart.canvas.setAttribute("role", "img");
    chart.canvas.setAttribute("aria-label", `${chart.name}: nothing measured yet`);
    chart.under = make("div", "foot");
    chart.canvas.onpointermove = event => { chart.at = event.offsetX / chart.canvas.clientWidth; draw(chart); };
    chart.canvas.onpointerleave = () => { chart.at = undefined; draw(chart); };
    card.append(name, chart.value, chart.canvas, chart.under);
    $("charts").append(card);
  }
}
/* Counters become rates over the last few seconds; one that fell means that the server was started again. */
function sample(stats) {
  const before = view.samples.at(-1);
  if (before && before.stats.generation_tokens > stats.generation_tokens) view.samples = [];
  const last = view.samples.at(-1) || { stats }, back = (view.samples.at(-10) || view.samples[0] || { stats }).stats;
  const span = stats.time - last.stats.time;
  const hit = stats.cached_tokens - back.cached_tokens, computed = stats.prompt_tokens_computed - back.prompt_tokens_computed;
  const looked = stats.cached_tokens + stats.prompt_tokens_computed;
  view.samples.push({
    stats, looked, running: stats.running, waiting: stats.waiting, kv: stats.kv_used, total: stats.generation_tokens,
    length: stats.verified_steps ? 1 + stats.accepted_tokens / stats.verified_steps : null,
    rows: stats.hisparse_rows ? stats.hisparse_hits / stats.hisparse_rows : null,
    speed: span > 0 ? (stats.generation_tokens - last.stats.generation_tokens) / span : null,
    hits: hit + computed > 0 ? hit / (hit + computed) : null, allHits: looked ? stats.cached_tokens / looked : 0,
  });
  if (view.samples.length > HISTORY) view.samples.shift();
  charts.forEach(draw);
  replicas(stats.replicas || []);
}
function draw(chart) {
  const samples = view.samples, canvas = chart.canvas, width = canvas.clientWidth, height = canvas.clientHeight;
  if (!samples.length) return;
  const place = chart.at === undefined ? samples.length - 1 : Math.round(chart.at * (HISTORY - 1)) - (HISTORY - samples.length);
  const shown = samples[Math.max(0, Math.min(place, samples.length - 1))];
  caption(chart, shown, samples.at(-1));
  if (!width) return;
  const scale = devicePixelRatio || 1, colors = getComputedStyle(document.documentElement), brush = canvas.getContext("2d");
  canvas.width = width * scale;
  canvas.height = height * scale;
  brush.scale(scale, scale);
  const most = Math.max(chart.top, ...samples.flatMap(s => chart.lines.map(line => line(s) || 0)));
  const x = index => (index + HISTORY - samples.length) / (HISTORY - 1) * (width - 4) + 2, y = value => height - 2 - value / most * (height - 6);
  brush.strokeStyle = colors.getPropertyValue("--line");
  brush.strokeRect(0, height - 1, width, 0);
  chart.lines.forEach((line, which) => {
    const color = colors.getPropertyValue(which ? "--second" : "--accent").trim();
    curve(brush, samples.map(line), x, y, height, color, which === 0);
  });
  if (chart.at !== undefined) {
    brush.fillStyle = colors.getPropertyValue("--soft");
    brush.fillRect(x(samples.indexOf(shown)), 2, 1, height - 4);
  }
}
function curve(brush, values, x, y, height, color, filled) {
  for (const part of runs(values)) {
    const path = new Path2D();
    part.forEach(([index, value], place) => place ? path.lineTo(x(index), y(value)) : path.moveTo(x(index), y(value)));
    if (filled) {
      const area = new Path2D(path);
      area.lineTo(x(part.at(-1)[0]), height - 1);
      area.lineTo(x(part[0][0]), height - 1);
      brush.globalAlpha = .14;
      brush.fillStyle = color;
      brush.fill(area);
      brush.globalAlpha = 1;
    }
    brush.lineWidth = 1.6;
    brush.lineJoin = "round";
    brush.strokeStyle = color;
    brush.stroke(path);
  }
}
/* Stretches without a gap. */
function runs(values) {
  const found = [];
  let open = null;
  values.forEach((value, index) => {
    if (value === null) { open = null; return; }
    if (!open) found.push(open = []);
    open.push([index, value]);
  });
  return found;
}
function caption(chart, shown, newest) {
  const [value, unit] = chart.now(shown);
  chart.value.replaceChildren(...(chart.dots ? [make("span", "dot")] : []), value, make("small", "", unit));
  const age = Math.round(newest.stats.time - shown.stats.time);
  const foot = age > 0 ? `${age} s ago` : chart.foot(shown);
  chart.under.replaceChildren(...(chart.dots && !age ? [make("span", "dot second")] : []), foot);
  chart.canvas.setAttribute("aria-label", `${chart.name}: ${value}${unit}; ${foot}`);
}
function replicas(list) {
  $("replica-part").hidden = list.length < 2;
  $("replicas").replaceChildren(...list.map((one, place) => {
    const line = make("tr");
    const cells = [place, one.state, number(one.running), number(one.waiting), `${number(one.kv_used * 100)} %`];
    line.append(...cells.map(cell => make("td", "", String(cell))));
    return line;
  }));
}

