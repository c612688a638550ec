"use strict";
// Sorts, filters and copies the tables, draws the charts, and keeps the state in the URL's fragment.
const page = JSON.parse(document.getElementById("data").textContent);
const state = new URLSearchParams(location.hash.slice(1).includes("=") ? location.hash.slice(1) : "");

function make(tag, attributes = {}, text = "") {
  const one = Object.assign(document.createElement(tag), { textContent: text });
  for (const [name, value] of Object.entries(attributes)) one.setAttribute(name, value);
  return one;
}

function keep(name, value) {
  if (value) state.set(name, value);
  else state.delete(name);
  history.replaceState(null, "", state.size ? "#" + state : location.pathname + location.search);
}

// A filter is words that a row holds, and conditions as gpus>=2 or engine=ddp,fsdp2; a row needs all.
function matcher(text, keys) {
  const tests = text.trim().split(/\s+/).filter(Boolean).map((word) => {
    const found = /^(\w+)(<=|>=|!=|=|<|>)(.*)$/.exec(word);
    if (!found || !keys.includes(found[1])) {
      const wanted = word.toLowerCase();
      return (row, cells) => cells.toLowerCase().includes(wanted);
    }
    const [, key, sign, given] = found;
    const at = keys.indexOf(key);
    return (row) => {
      const value = row[at];
      const number = typeof value === "number", same = (one) => (number ? value === Number(one) : String(value ?? "-") === one);
      if (sign === "=" || sign === "!=") return given.split(",").some(same) === (sign === "=");
      if (!number) return false; // unknown is neither more nor less
      const b = Number(given);
      return { "<": value < b, ">": value > b, "<=": value <= b, ">=": value >= b }[sign];
    };
  });
  return (row, cells) => tests.every((test) => test(row, cells));
}

// Unknown values stay last in both directions.
const words = new Intl.Collator(undefined, { numeric: true });
const compare = (a, b, down) => (a === null || b === null ? (a === null) - (b === null)
  : (down ? -1 : 1) * (typeof a === "number" && typeof b === "number" ? a - b : words.compare(a, b)));

// A cell of CSV; a ' stands before words that a spreadsheet would take for a formula.
function quoted(value) {
  let text = value === null ? "" : String(value);
  if (typeof value === "string" && /^\s*[=+\-@]/.test(text) && !/^\s*([+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?( ?%)?|-)\s*$/i.test(text))
    text = "'" + text;
  return /[",\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
}

class Sheet {
  constructor(name, { keys, numbers, raw, formats, few }) { // formats, few: of a long table, with all values here
    Object.entries(few ?? {}).forEach(([key, { values, places }]) => { raw[key] = places.map((i) => values[i]); });
    Object.assign(this, { name, keys, numbers, raw, formats, texts: null });
    this.table = document.getElementById("table-" + name);
    this.body = this.table.tBodies[0];
    this.lines = formats ? raw[keys[0]].map(() => make("tr")) : [...this.body.rows];
    this.order = this.lines.map((_, i) => i);
    this.heads = [...this.table.tHead.rows[0].cells];
    this.heads.forEach((head, i) => { head.firstChild.onclick = () => this.sort(i); });
    const bar = this.table.parentElement.previousElementSibling, [markdown, csv] = bar.querySelectorAll("button");
    Object.assign(this, { input: bar.querySelector("input"), said: bar.querySelector("span") });
    this.input.oninput = () => this.filter();
    markdown.onclick = () => this.copy(this.markdown());
    csv.onclick = () => this.copy(this.csv());
    if (formats) this.body.onclick = this.body.onkeydown = (event) => this.choose(event, event.target.closest("tr"));
    const [key, down] = (state.get(name + ".sort") ?? "").split(":");
    if (keys.includes(key)) this.sort(keys.indexOf(key), down === "down");
    if (state.has(name + ".filter")) this.filter(state.get(name + ".filter"));
    if (formats) this.mark(Number(state.get(name + ".marked")));
  }

  get rows() { // read when they are first needed: 500 runs have 15,000 cells
    const value = (text, key) => (text === "-" ? null : this.numbers.includes(key) ? Number(text) : text);
    return page.tables[this.name].rows ??= this.lines.map((line, i) => this.keys.map((key, k) =>
      (key in this.raw ? this.raw[key][i] : value(line.cells[k].textContent.trim(), key))));
  }

  async copy(text) {
    this.said.textContent = await navigator.clipboard.writeText(text).then(() => "copied", () => "the browser refused to copy");
  }

  choose(event, line) { // a click, Enter or Space marks a row; arrows go on to the next
    const to = { ArrowDown: line.nextElementSibling, ArrowUp: line.previousElementSibling }[event.key];
    if (!to && ![undefined, "Enter", " "].includes(event.key)) return;
    if (!to) this.mark(this.lines.indexOf(line));
    (to ?? line).focus();
    event.preventDefault();
  }

  mark(i) { // the row that charts show alone; where the filter leaves it out, the first one
    this.marked = i;
    keep(this.name + ".marked", i ? String(i) : "");
    this.tell();
  }

  cells(i) {
    if (!this.formats) return [...this.lines[i].cells].map((one) => one.textContent.trim());
    const written = (value, [how, digits, unit]) => (unit ? 100 * value : value)[how](digits) + unit;
    return this.rows[i].map((value, k) => (value === null ? "-" : written(value, this.formats[k])));
  }

  draw(shown) {
    if (!shown.includes(this.marked)) this.marked = shown[0];
    this.body.replaceChildren(...shown.slice(0, 200).map((i, at, some) => { // Tab leads to one row
      const line = this.lines[i];
      if (!line.cells.length) line.append(...this.cells(i).map((text, k) =>
        make("td", this.numbers.includes(this.keys[k]) ? { class: "n" } : {}, text)));
      line.ariaCurrent = String(i === this.marked);
      line.tabIndex = i === this.marked || (at === 0 && !some.includes(this.marked)) ? 0 : -1;
      return line;
    }));
  }

  sort(column, down = this.heads[column].getAttribute("aria-sort") === "ascending") {
    this.heads.forEach((head, k) => { head.ariaSort = k !== column ? null : down ? "descending" : "ascending"; });
    this.order.sort((a, b) => compare(this.rows[a][column], this.rows[b][column], down) || a - b);
    this.body.append(...this.order.map((i) => this.lines[i]));
    keep(this.name + ".sort", this.keys[column] + (down ? ":down" : ":up"));
    this.tell();
  }

  filter(text = this.input.value) {
    this.input.value = text;
    const fits = matcher(text, this.keys);
    this.texts ??= this.lines.map((_, i) => this.cells(i).join(" "));
    this.lines.forEach((line, i) => { line.hidden = !fits(this.rows[i], this.texts[i]); });
    keep(this.name + ".filter", text.trim());
    this.said.textContent = `${this.shown().length} of ${this.lines.length} rows`;
    this.tell();
  }

  limit(key, condition) { // in place of the conditions on this column
    const others = this.input.value.split(/\s+/).filter((word) => !new RegExp(`^${key}[<>=!]`).test(word));
    this.filter([...others, condition].filter(Boolean).join(" "));
  }

  shown() {
    return this.order.filter((i) => !this.lines[i].hidden);
  }

  tell() {
    if (this.formats) this.draw(this.shown());
    charts.filter((chart) => chart.follows === this.name).forEach((chart) => chart.update());
  }

  csv() {
    return [this.keys.join(","), ...this.shown().map((i) => this.rows[i].map(quoted).join(",")), ""].join("\n");
  }

  markdown() {
    const line = (cells) => "| " + cells.join(" | ") + " |", text = (one) => one.replaceAll("|", "\\|");
    const rule = this.keys.map((key) => (this.numbers.includes(key) ? "---:" : "---"));
    const body = this.shown().map((i) => line(this.cells(i).map(text)));
    return [line(this.heads.map((head) => text(head.textContent))), line(rule), ...body, ""].join("\n");
  }
}

function save() {
  Object.values(sheets).forEach((sheet) => sheet.rows); // so that they are in the page's data
  const href = URL.createObjectURL(new Blob([JSON.stringify(page)], { type: "application/json" }));
  make("a", { download: "study.json", href }).click();
}

// Rows of a table or of a data set's columns as objects.
const expanded = {};
function objects(name) {
  const { keys } = page.tables[name] ?? {};
  return expanded[name] ??= keys
    ? sheets[name].rows.map((row) => Object.fromEntries(keys.map((key, k) => [key, row[k]])))
    : page.data[name].flatMap(({ same, columns }) => {
      const entries = Object.entries(columns);
      return Array.from({ length: entries[0]?.[1].length ?? 0 }, (_, i) =>
        Object.assign({}, same, Object.fromEntries(entries.map(([k, v]) => [k, v[i]]))));
    });
}

const tip = document.body.appendChild(make("div", { class: "tip", hidden: "" }));

function showTip(_, event, __, value) {
  if ((tip.hidden = !value)) return;
  const short = (v) => (Number.isFinite(+v) && v !== "" && v !== null ? String(+(+v).toPrecision(4)) : v);
  const said = typeof value === "object" ? Object.entries(value) : [["", value]];
  tip.replaceChildren(...said.map(([k, v]) => make("div", {}, k ? `${k}: ${short(v)}` : String(v))));
  tip.style.left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 8) + "px";
}

let library = null; // Vega's scripts: they stand in the page packed, and start with the first chart
function vega() {
  return library ??= (async () => {
    const packed = Uint8Array.from(atob(document.getElementById("vega").textContent), (c) => c.charCodeAt(0));
    const text = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    document.head.append(make("script", {}, "{" + await new Response(text).text() + "}")); // names of its own
    const warn = console.warn; // Vega-Lite warns of every chart whose height follows from its rows
    console.warn = (...said) => String(said).includes('Dropping "fit-y"') || warn(...said);
  })();
}

// A chart over a table shows the rows that its filter leaves; another chart, the table of runs' runs.
class Drawing {
  constructor(chart, i) {
    Object.assign(this, chart, { at: document.getElementById("chart-" + i) });
    this.follows = this.data in page.tables ? this.data : "runs";
  }

  wanted() {
    const sheet = sheets[this.follows], all = objects(this.data);
    if (this.axes) { // a layout map: what the filter leaves out stays, faintly
      const left = new Set(sheet.shown());
      return all.map((row, i) => ({ ...row, left: left.has(i) }));
    }
    const some = this.limit === 1 ? [sheet.marked] : sheet.shown().slice(0, this.limit || Infinity);
    if (this.follows === this.data) return some.map((i) => all[i]).filter(Boolean);
    const run = sheet?.keys.indexOf("run");
    const own = new Set(all.map((row) => row.run)); // a run without such data takes no place
    const names = sheet ? sheet.shown().map((i) => sheet.rows[i][run]).filter((name) => own.has(name)) : [...own];
    const place = new Map(names.slice(0, this.limit || Infinity).map((name, k) => [name, k]));
    const found = all.filter((row) => row.run === undefined || place.has(row.run));
    return found.sort((a, b) => place.get(a.run) - place.get(b.run));
  }

  draw() { // once, when it comes near the screen or nothing else is to do
    return this.drawn ??= vega().then(() => {
      const { config } = this.spec, narrow = this.at.clientWidth < 600
        && { legend: { ...config.legend, columns: 2 }, axisY: { labelLimit: 110 } };
      const spec = { ...this.spec, config: { ...config, ...narrow }, data: { name: "rows", values: this.wanted() } };
      const options = { mode: "vega-lite", renderer: "svg", actions: false, tooltip: showTip, logLevel: 1 };
      return vegaEmbed(this.at, spec, options);
    }).then(({ view }) => {
      this.view = view;
      if (this.axes) this.brush();
      if (this.stale) this.update();
    });
  }

  update() {
    this.stale = !this.view; // a filter that came while it was being drawn
    if (this.view) this.view.data("rows", this.wanted()).runAsync();
  }

  brush() { // a drag along an axis limits the table to what it spans; a click frees the axis
    const box = this.at.appendChild(make("div", { class: "brush" }));
    let from = null;
    const place = ({ clientX, clientY }) => {
      const { x, y } = this.at.getBoundingClientRect(), [left, top] = this.view.origin();
      const step = this.view.scale("x").step(), k = Math.floor((clientX - x - left) / step);
      return { axis: this.axes[k], x: left + (k + 0.5) * step - 7, y: clientY - y, share: this.view.scale("y").invert(clientY - y - top) };
    };
    this.at.onpointerdown = (event) => { from = place(event).axis ? place(event) : null; };
    this.at.onpointermove = (event) => {
      const ends = from && [from.y, place(event).y].sort((a, b) => a - b);
      box.style.cssText = ends ? `display:block;left:${from.x}px;top:${ends[0]}px;height:${ends[1] - ends[0]}px` : "";
    };
    addEventListener("pointerup", (event) => {
      if (!from) return;
      const [low, high] = [from.share, place(event).share].sort((a, b) => a - b);
      const { key, values, ends: [first, last], log } = from.axis, n = values?.length - 1;
      const some = values?.filter((_, i) => i >= low * n && i <= high * n).map((one) => one ?? "-");
      const bound = (share) => (log ? first * (last / first) ** share : first + share * (last - first)).toPrecision(4);
      const span = high < 0 ? `${key}=-` : `${key}>=${bound(low)} ${key}<=${bound(high)}`;
      sheets[this.follows].limit(key, Math.abs(place(event).y - from.y) < 4 ? "" : values ? some.length && `${key}=${some}` : span);
      box.style.cssText = "";
      from = null;
    });
  }
}

function go(id) { // to a heading or a cell, also one that a filter hides
  const target = document.getElementById(id), line = target?.closest("tr");
  if (!target) return;
  if (line?.hidden) Object.values(sheets).find((sheet) => sheet.table.contains(line)).filter("");
  target.scrollIntoView({ block: line ? "center" : "start", inline: "nearest" });
  target.tabIndex = -1;
  target.focus({ preventScroll: true });
}

const charts = page.charts.map((chart, i) => new Drawing(chart, i));
const sheets = {};
for (const [name, table] of Object.entries(page.tables)) {
  if (document.getElementById("table-" + name)) sheets[name] = new Sheet(name, table);
}
document.querySelector("nav button").onclick = save;
addEventListener("click", (event) => { // a link inside the page leaves filter and sort in the URL
  const link = event.target.closest?.('a[href^="#"]');
  if (!link) return;
  event.preventDefault();
  keep("at", link.hash.slice(1));
  go(link.hash.slice(1));
});
if (state.has("at")) go(state.get("at"));
const near = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting)
  .forEach((entry) => charts.find((chart) => chart.at === entry.target).draw()), { rootMargin: "300px" });
charts.forEach((chart) => near.observe(chart.at));
addEventListener("load", async () => { // the others, one by one, so that the page is whole when it is printed
  for (const chart of charts) await new Promise((next) => requestIdleCallback(next)).then(() => chart.draw());
});
