"use strict";
// Sorting and filtering of the tables, and the charts, which start when they come near the screen.

for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  const heads = [...table.querySelectorAll("th")];
  heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = row => {
      const cell = row.cells[column];
      return cell.dataset.raw === undefined ? cell.textContent : Number(cell.dataset.raw);
    };
    const unknown = value => value === "-";
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (unknown(x) || unknown(y)) return unknown(x) - unknown(y); // unknown values stay last
      const order = typeof x === "number" && typeof y === "number"
        ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
      return down ? -order : order;
    });
    body.append(...rows);
  }));
  const input = table.previousElementSibling?.querySelector("input");
  input?.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of body.rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every(word => text.includes(word));
    }
  });
}

let starting;
function library() {
  starting ??= (async () => {
    const packed = document.getElementById("vega").textContent;
    const bytes = Uint8Array.from(atob(packed), letter => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  })();
  return starting;
}

const specs = JSON.parse(document.getElementById("data").textContent);
const drawn = new Map();
function draw(place) {
  if (!drawn.has(place)) {
    drawn.set(place, library().then(() => window.vegaEmbed(
      place, specs[place.dataset.chart], { actions: false, renderer: "svg", logLevel: 1 })));
  }
  return drawn.get(place);
}
const places = [...document.querySelectorAll(".chart")];
const watch = new IntersectionObserver(seen => {
  for (const entry of seen) if (entry.isIntersecting) draw(entry.target);
}, { rootMargin: "300px" });
places.forEach(place => watch.observe(place));

// A printer gets every chart; one that prints before they are drawn, those that are.
window.addEventListener("beforeprint", () => places.forEach(draw));
window.drawAll = () => Promise.all(places.map(draw));
