"use strict";
// Sorts, filters and copies the tables, draws the charts, and keeps the state in the URL's fragment.
const page = JSON.parse(document.getElementById("data").textContent);
const state = new URLSearchParams(location.hash.slice(1).includes("=") ? location.hash.slice(1) : "");
let left = null; // the names of the runs that the filter leaves, in the table's order; null: all

function make(tag, attributes = {}, text = "") {
  const one = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) one.setAttribute(name, value);
  one.textContent = text;
  return one;
}

function keep(name, value) {
  if (value) state.set(name, value);
  else state.delete(name);
  history.replaceState(null, "", state.size ? "#" + state : location.pathname + location.search);
}

// A filter is words that a row holds, and conditions as gpus>=2 or engine=ddp; a row needs all.
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
      const [a, b] = typeof value === "number" ? [value, Number(given)] : [String(value ?? "-"), given];
      if (sign === "=") return a === b;
      if (sign === "!=") return a !== b;
      if (typeof a !== "number") return false; // unknown is neither more nor less
      return { "<": a < b, ">": a > b, "<=": a <= b, ">=": a >= b }[sign];
    };
  });
  return (row, cells) => tests.every((test) => test(row, cells));
}

// Unknown values stay last in both directions.
function compare(a, b, down) {
  if (a === null || b === null) return (a === null) - (b === null);
  const order = typeof a === "number" && typeof b === "number"
    ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
  return down ? -order : order;
}

function quoted(value) {
  const text = value === null ? "" : String(value);
  return /[",\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
}

class Sheet {
  constructor(name, { keys, numbers, raw }) {
    Object.assign(this, { name, keys, numbers });
    this.table = document.getElementById("table-" + name);
    this.body = this.table.tBodies[0];
    this.lines = [...this.body.rows];
    this.texts = null;
    const value = (text, key) => (text === "-" ? null : numbers.includes(key) ? Number(text) : text);
    this.rows = page.tables[name].rows = this.lines.map((line, i) =>
      keys.map((key, k) => (key in raw ? raw[key][i] : value(line.cells[k].textContent.trim(), key))));
    this.heads = [...this.table.tHead.rows[0].cells];
    this.heads.forEach((head, i) => {
      const button = make("button", { type: "button" }, head.textContent);
      button.addEventListener("click", () => this.sort(i));
      head.replaceChildren(button);
    });
    this.order = this.rows.map((_, i) => i);
    this.tools();
    this.restore();
  }

  tools() {
    const bar = make("div", { class: "tools" });
    const label = make("label", {}, "Filter");
    this.input = make("input", { type: "search", placeholder: "words, or gpus>=2 engine=ddp",
      "aria-label": "Filter table " + this.name });
    this.input.addEventListener("input", () => this.filter());
    label.append(this.input);
    const said = make("span", { class: "said", role: "status" });
    const button = (text, act) => {
      const one = make("button", { type: "button" }, text);
      one.addEventListener("click", act);
      return one;
    };
    const copy = async (text) => {
      try {
        await navigator.clipboard.writeText(text);
        said.textContent = "copied";
      } catch {
        const area = make("textarea", {}, text);
        bar.append(area);
        area.select();
        said.textContent = document.execCommand("copy") ? "copied" : "the browser refused to copy";
        area.remove();
      }
    };
    this.said = said;
    bar.append(label, button("Copy as Markdown", () => copy(this.markdown())),
      button("Copy as CSV", () => copy(this.csv())), said);
    if (this.name === "runs") bar.append(button("Save all data as JSON", save));
    this.table.parentElement.before(bar);
  }

  restore() {
    this.input.value = state.get(this.name + ".filter") ?? "";
    const [key, down] = (state.get(this.name + ".sort") ?? "").split(":");
    if (this.keys.includes(key)) this.sort(this.keys.indexOf(key), down === "down");
    if (this.input.value) this.filter();
  }

  sort(column, down = this.heads[column].getAttribute("aria-sort") === "ascending") {
    this.heads.forEach((head) => head.removeAttribute("aria-sort"));
    this.heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
    this.order.sort((a, b) => compare(this.rows[a][column], this.rows[b][column], down) || a - b);
    this.body.append(...this.order.map((i) => this.lines[i]));
    keep(this.name + ".sort", this.keys[column] + (down ? ":down" : ":up"));
    this.tell();
  }

  filter() {
    const fits = matcher(this.input.value, this.keys);
    this.texts ??= this.lines.map((line) => line.textContent);
    this.lines.forEach((line, i) => { line.hidden = !fits(this.rows[i], this.texts[i]); });
    keep(this.name + ".filter", this.input.value.trim());
    this.said.textContent = `${this.shown().length} of ${this.rows.length} rows`;
    this.tell();
  }

  shown() {
    return this.order.filter((i) => !this.lines[i].hidden);
  }

  tell() { // the table of runs decides what the charts show
    if (this.name !== "runs") return;
    const run = this.keys.indexOf("run");
    left = this.shown().map((i) => this.rows[i][run]);
    charts.forEach((chart) => chart.update());
  }

  csv() {
    const lines = this.shown().map((i) => this.rows[i].map(quoted).join(","));
    return [this.keys.join(","), ...lines, ""].join("\n");
  }

  markdown() {
    const line = (cells) => "| " + cells.join(" | ") + " |";
    const text = (one) => one.textContent.replaceAll("|", "\\|");
    const rule = this.keys.map((key) => (this.numbers.includes(key) ? "---:" : "---"));
    const body = this.shown().map((i) => line([...this.lines[i].cells].map((one) => text(one).trim())));
    return [line(this.heads.map(text)), line(rule), ...body, ""].join("\n");
  }
}

function save() {
  const link = make("a", { download: "study.json",
    href: URL.createObjectURL(new Blob([JSON.stringify(page)], { type: "application/json" })) });
  link.click();
  URL.revokeObjectURL(link.href);
}

// Rows of a table or of a data set's columns as objects.
const expanded = {};
function rows(name) {
  expanded[name] ??= name in page.tables
    ? page.tables[name].rows.map((row) => Object.fromEntries(page.tables[name].keys.map((k, i) => [k, row[i]])))
    : page.data[name].flatMap(({ same, columns }) => {
      const entries = Object.entries(columns);
      const n = entries.length ? entries[0][1].length : 0;
      return Array.from({ length: n }, (_, i) =>
        Object.assign({}, same, Object.fromEntries(entries.map(([k, v]) => [k, v[i]]))));
    });
  return expanded[name];
}

const tip = make("div", { class: "tip", hidden: "" });
document.body.append(tip);

function showTip(_, event, __, value) {
  tip.hidden = !value;
  if (!value) return;
  const short = (v) => (Number.isFinite(+v) && v !== "" && v !== null ? String(+(+v).toPrecision(4)) : v);
  const said = typeof value === "object" ? Object.entries(value) : [["", value]];
  tip.replaceChildren(...said.map(([k, v]) => make("div", {}, k ? `${k}: ${short(v)}` : String(v))));
  tip.style.left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 8) + "px";
}

class Drawing {
  constructor(chart, i) {
    Object.assign(this, chart);
    this.at = document.getElementById("chart-" + i);
    this.view = null;
  }

  wanted() {
    const all = rows(this.data);
    const names = left ?? [...new Set(all.map((row) => row.run))];
    const some = this.limit ? names.slice(0, this.limit) : names;
    const place = new Map(some.map((name, k) => [name, k]));
    const found = all.filter((row) => row.run === undefined || place.has(row.run));
    return left ? found.sort((a, b) => place.get(a.run) - place.get(b.run)) : found;
  }

  draw() { // once, when it comes near the screen or is printed
    if (this.drawn) return this.drawn;
    const spec = { ...this.spec, data: { name: "rows", values: this.wanted() } };
    const options = { mode: "vega-lite", renderer: "svg", actions: false, tooltip: showTip, logLevel: 1 };
    this.drawn = vegaEmbed(this.at, spec, options).then(({ view }) => {
      this.view = view;
      if (this.stale) this.update();
    });
    return this.drawn;
  }

  update() {
    this.stale = !this.view; // a filter that came while it was being drawn
    if (this.view) this.view.data("rows", this.wanted()).runAsync();
  }
}

const charts = page.charts.map((chart, i) => new Drawing(chart, i));
const sheets = {};
for (const [name, table] of Object.entries(page.tables)) {
  if (document.getElementById("table-" + name)) sheets[name] = new Sheet(name, table);
}
const near = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) charts.find((chart) => chart.at === entry.target).draw();
  }
}, { rootMargin: "300px" });
charts.forEach((chart) => near.observe(chart.at));
addEventListener("beforeprint", () => charts.forEach((chart) => chart.draw()));
