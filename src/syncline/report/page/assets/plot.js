// Draws curves: loss and accuracy against time, steps, samples or bytes. Each run is a line.

const DASHES = ["", "7 3", "2 3", "9 3 2 3", "5 5", "1 2"];
const SHAPES = [
  (x, y) => `M${x - 3.6} ${y}a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0z`,
  (x, y) => `M${x - 3.4} ${y - 3.4}h6.8v6.8h-6.8z`,
  (x, y) => `M${x} ${y - 4.6}l4.6 4.6l-4.6 4.6l-4.6 -4.6z`,
  (x, y) => `M${x} ${y - 4.2}l4.4 7.6h-8.8z`,
  (x, y) => `M${x} ${y + 4.2}l4.4 -7.6h-8.8z`,
  (x, y) => `M${x - 3.8} ${y - 1.3}h2.5v-2.5h2.6v2.5h2.5v2.6h-2.5v2.5h-2.6v-2.5h-2.5z`,
];
const AXES = {
  time_s: ["time, seconds", (value) => three(value)],
  step: ["steps", (value) => Math.round(value).toLocaleString("en")],
  samples: ["samples", (value) => compact(value)],
  sent_bytes: ["bytes sent, all ranks together", (value) => `${compact(value)}B`],
};

function compact(value) {
  for (const [unit, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (value >= size) return `${+(value / size).toPrecision(3)} ${unit}`;
  }
  return `${+value.toPrecision(3)} `;
}

/** Round numbers that cover a range. */
function roundTicks(low, high, count) {
  const raw = (high - low) / count;
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const tick = [1, 2, 2.5, 5, 10].map((m) => m * power).find((one) => one >= raw * 0.999);
  const found = [];
  for (let k = Math.ceil(low / tick - 1e-9); k * tick <= high * (1 + 1e-9); k++) found.push(k * tick);
  return found;
}

function escaped(text) {
  return text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
}

/**
 * Curves as SVG. Each line is {name, number, points}; a point has the numbers of both axes, and
 * may have `low` and `high`, the range over seeds.
 */
function curves(lines, { across, up, words, width, height = 250, target = null }) {
  const [left, right, top, bottom] = [46, 12, 12, 40];
  const points = lines.flatMap((line) => line.points);
  const xs = points.map((point) => point[across]);
  const ys = points.flatMap((point) => [point.low ?? point[up], point.high ?? point[up]]);
  if (target !== null) ys.push(target);
  const [x1, y0, y1] = [Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const edge = (y1 - y0) * 0.06 || Math.abs(y1) * 0.1 || 1;
  const [low, high] = [up === "loss" || up === "test_loss" ? Math.max(0, y0 - edge) : y0 - edge, y1 + edge];
  const X = (x) => left + (x / (x1 || 1)) * (width - left - right);
  const Y = (y) => height - bottom - ((y - low) / (high - low)) * (height - top - bottom);
  const parts = [];
  const text = (x, y, css, what) => parts.push(`<text class="${css}" x="${x}" y="${y}">${escaped(what)}</text>`);
  for (const tick of roundTicks(low, high, 4)) {
    const y = Y(tick).toFixed(1);
    parts.push(`<line class="grid" x1="${left}" x2="${width - right}" y1="${y}" y2="${y}"/>`);
    text(left - 6, +y + 4, "end", up === "accuracy" ? `${+(tick * 100).toFixed(2)}%` : `${+tick.toPrecision(3)}`);
  }
  let last = -Infinity;
  for (const tick of roundTicks(0, x1, width < 400 ? 3 : 5)) {
    const what = AXES[across][1](tick).trim();
    const half = what.length * 3.4;
    if (X(tick) - half < last || X(tick) + half > width) continue;
    last = X(tick) + half + 10;
    text(X(tick).toFixed(1), height - bottom + 17, "middle", what);
  }
  parts.push(`<line class="axis" x1="${left}" x2="${width - right}" y1="${height - bottom}" y2="${height - bottom}"/>`);
  text((left + width - right) / 2, height - 5, "label middle", AXES[across][0]);
  if (target !== null) {
    const y = Y(target).toFixed(1);
    parts.push(`<line class="l-ideal" x1="${left}" x2="${width - right}" y1="${y}" y2="${y}"/>`);
  }
  for (const line of lines) {
    const n = line.number % SHAPES.length;
    const turn = Math.floor(line.number / SHAPES.length); // from the seventh line on marks are hollow
    const at = line.points.map((point) => `${X(point[across]).toFixed(1)} ${Y(point[up]).toFixed(1)}`);
    if (line.points.some((point) => point.high > point.low)) {
      const over = line.points.map((point) => `${X(point[across]).toFixed(1)} ${Y(point.high).toFixed(1)}`);
      const under = line.points.map((point) => `${X(point[across]).toFixed(1)} ${Y(point.low).toFixed(1)}`);
      parts.push(`<path class="band c-${n}" d="M${[...over, ...under.reverse()].join("L")}Z"/>`);
    }
    parts.push(`<path class="curve c-${n}" stroke-dasharray="${DASHES[(line.number + 3 * turn) % DASHES.length]}" d="M${at.join("L")}"><title>${escaped(line.name)}</title></path>`);
    const every = Math.max(1, Math.ceil(line.points.length / 12));
    line.points.forEach((point, k) => {
      if (k % every && k !== line.points.length - 1) return;
      parts.push(`<path class="mark c-${n}${turn ? " hollow" : ""}" d="${SHAPES[n](X(point[across]), Y(point[up]))}"/>`);
    });
  }
  const box = `width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"`;
  return `<svg ${box} role="img" aria-label="${escaped(words)}">${parts.join("")}</svg>`;
}

/** A panel of curves, with a switch for what they are drawn against and, if there are several, a choice. */
class Curves {
  constructor(root) {
    this.root = root;
    this.data = JSON.parse(root.querySelector("script").textContent);
    for (const one of root.querySelectorAll("select, input")) one.addEventListener("input", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(root);
  }

  get width() {
    const wide = this.root.clientWidth;
    return Math.max(260, Math.floor(wide > 1000 ? (wide - 28) / 2 : Math.min(wide, 760)));
  }

  draw() {
    const choice = this.root.querySelector("select")?.value ?? "0";
    const across = this.root.querySelector("input:checked").value;
    if (!this.root.clientWidth) return;
    const key = [choice, across, this.width].join(" ");
    if (key === this.drawn) return;
    this.drawn = key;
    const sets = this.data[Number(choice)].charts;
    this.root.querySelector(".charts").innerHTML = sets
      .flatMap((chart) => chart.ups.map((up) => this.chart(chart, up, across)))
      .join("");
  }

  chart(chart, up, across) {
    const lines = chart.lines.flatMap((line, number) => {
      const points = line.points
        .filter((point) => point[across] !== null && point[across] !== undefined && (point[up.key] ?? null) !== null)
        .map((point) => ({ ...point, low: point[`${up.key}_low`], high: point[`${up.key}_high`] }));
      return points.length ? [{ name: line.name, number: line.number ?? number, points }] : [];
    });
    const title = [chart.title, up.words].filter(Boolean).join(": ");
    if (!lines.length) return "";
    const target = up.key === "accuracy" ? (chart.target ?? null) : null;
    const words = `${title} against ${AXES[across][0]}: ${lines.map((line) => line.name).join(", ")}`;
    const svg = curves(lines, { across, up: up.key, words, width: this.width, target });
    return `<figure><h3>${escaped(title)}</h3>${svg}</figure>`;
  }
}
