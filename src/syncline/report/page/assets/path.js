// Draws the critical path and a chosen task into the timeline, and the overview above it.

/** The path's stretches: what one task does on it, from when to when. */
Timeline.prototype.stretches = function () {
  const { graph, timed } = this;
  if (timed.stretches) return timed.stretches;
  const { moments } = graph.path(timed);
  const found = [];
  for (let k = 1; k < moments.length; k++) {
    const [from, to] = [timed.times[moments[k - 1]], timed.times[moments[k]]];
    const t = graph.task[moments[k]];
    if (to <= from || t < 0) continue;
    const last = found[found.length - 1];
    if (last && last.t === t && last.to === from && last.kind === graph.kindOf[moments[k]]) last.to = to;
    else found.push({ t, from, to, kind: graph.kindOf[moments[k]], paint: this.pathPaint(t, graph.kindOf[moments[k]]) });
  }
  timed.stretches = found;
  return found;
};

Timeline.prototype.pathPaint = function (t, kindOfCost) {
  const { lanes, graph } = this;
  if (graph.facts.classes[kindOfCost] === "between") return -1;
  const paint = lanes.isCompute[graph.kind[t]] ? lanes.paintOfKind[graph.kind[t]] : lanes.paintOf(graph.kind[t], kindOfCost);
  return paint >= SOLID.length ? PAINT.work : paint;
};

Timeline.prototype.drawPath = function () {
  const { pen, ink, graph, lanes } = this;
  let box = null;
  pen.lineWidth = 2;
  const close = () => {
    pen.strokeStyle = ink.path;
    if (box && box.b - box.a > 1.5) {
      pen.strokeRect(box.a + 0.5, this.top(box.row) - 1, box.b - box.a - 1, this.height(box.row) - 1);
    }
  };
  for (const one of this.stretches()) {
    if (one.to < this.from) continue;
    if (one.from > this.to) break;
    const a = Math.max(this.gutter - 4, this.x(one.from));
    const b = Math.min(this.width + 4, this.x(one.to));
    const row = lanes.row(one.t);
    pen.fillStyle = one.paint < 0 ? ink.other : ink.paints[one.paint];
    pen.fillRect(a, AXIS, Math.max(0.7, b - a - 0.5), TRACK);
    if (b - a > 60) this.pathLabel(one, Math.max(a, this.gutter), b);
    if (box && box.row === row && a - box.b < 2) box.b = Math.max(box.b, b);
    else {
      close();
      if (box) this.link(box.b, this.middle(box.row), a, this.middle(row));
      box = { row, a, b };
    }
  }
  close();
};

Timeline.prototype.pathLabel = function (one, a, b) {
  const { pen, ink, graph, lanes } = this;
  this.font(500, 11.5);
  const words = `r${graph.rank[one.t]} ${lanes.brief(one.t)}`;
  if (pen.measureText(words).width + 8 > b - a) return;
  pen.textAlign = "left";
  pen.fillStyle = one.paint < 0 ? ink.ink : ink.on[one.paint];
  pen.fillText(words, a + 4, AXIS + TRACK / 2 + 0.5);
};

/** From afar: what the path is made of, and a red line below each rank that is on it. */
Timeline.prototype.drawFarPath = function () {
  const { pen, ink, graph, lanes } = this;
  const bins = Math.max(1, Math.ceil(this.width - this.gutter));
  const rows = lanes.all.length;
  const sums = new Float32Array(bins * PAINTS.length);
  const onRow = new Float32Array(bins * rows);
  for (const one of this.stretches()) {
    if (one.to < this.from || one.from > this.to) continue;
    const [a, b] = [this.x(one.from) - this.gutter, this.x(one.to) - this.gutter];
    if (one.paint >= 0) spread(sums, PAINTS.length, one.paint, a, b, 1);
    spread(onRow, rows, lanes.rowOf.get(graph.rank[one.t] * 2) ?? lanes.row(one.t), a, b, 1);
  }
  this.stackBins(sums, bins, AXIS, TRACK);
  pen.fillStyle = ink.path;
  for (let p = 0; p < bins; p++) {
    for (let row = 0; row < rows; row++) {
      const part = onRow[p * rows + row];
      if (part < 0.02) continue;
      pen.globalAlpha = Math.min(1, 0.15 + part);
      pen.fillRect(this.gutter + p, this.top(row) - 2, 1.02, 2.5);
    }
  }
  pen.globalAlpha = 1;
};

Timeline.prototype.middle = function (row) {
  return this.top(row) + (this.height(row) - 3) / 2;
};

Timeline.prototype.link = function (x0, y0, x1, y1) {
  const { pen } = this;
  if (Math.abs(y0 - y1) < 1 && x1 - x0 < 2) return;
  const bend = Math.max(6, Math.min(28, Math.abs(x1 - x0) / 2));
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
  pen.stroke();
};

/** Outline the chosen task, and draw lines from the tasks that it waited for. */
Timeline.prototype.drawChosen = function () {
  const { pen, ink, graph, timed, lanes } = this;
  const t = this.chosen;
  const [from, to] = [this.x(timed.times[graph.start[t]]), this.x(timed.times[graph.end[t]])];
  const row = lanes.row(t);
  pen.strokeStyle = ink.ink;
  pen.lineWidth = 2.5;
  pen.strokeRect(from, this.top(row) - 0.5, Math.max(2, to - from), this.height(row) - 2);
  pen.lineWidth = 1.5;
  for (const other of graph.reasons(t, timed).slice(0, 3)) {
    const end = this.x(timed.times[graph.end[other]]);
    this.link(end, this.middle(lanes.row(other)), Math.max(from, Math.min(end + 4, to)), this.middle(row));
  }
};

/** The whole run, as its compute lanes spent it; and which part of it is shown below. */
class Overview {
  constructor(canvas, timeline) {
    this.canvas = canvas;
    this.timeline = timeline;
  }

  draw() {
    const { timeline } = this;
    const { graph, ink, timed } = timeline;
    if (!graph) return;
    const height = 42;
    const [pen, width] = sized(this.canvas, height);
    const left = timeline.gutter;
    const bins = Math.max(1, Math.floor(width - left));
    const sums = this.sums(bins);
    pen.fillStyle = ink.panel;
    pen.fillRect(0, 0, width, height);
    for (let p = 0; p < bins; p++) {
      let y = height - 3;
      for (let paint = 0; paint < PAINTS.length; paint++) {
        const tall = (sums[p * PAINTS.length + paint] / this.lanes) * (height - 6);
        if (tall < 0.05) continue;
        pen.fillStyle = ink.paints[paint];
        pen.fillRect(left + p, y - tall, 1.02, tall);
        y -= tall;
      }
    }
    const [a, b] = [timeline.from, timeline.to].map((time) => left + (time / timed.total) * bins);
    pen.fillStyle = ink.panel;
    pen.globalAlpha = 0.62;
    pen.fillRect(left, 0, Math.max(0, a - left), height);
    pen.fillRect(b, 0, Math.max(0, width - b), height);
    pen.globalAlpha = 1;
    pen.strokeStyle = ink.accent;
    pen.lineWidth = 2;
    pen.strokeRect(Math.max(left, a), 1, Math.max(3, Math.min(b, width - 1) - Math.max(left, a)), height - 2);
    pen.fillStyle = ink.soft;
    pen.font = `400 11px ${ink.sans}`;
    pen.textBaseline = "middle";
    pen.fillText(left < 50 ? "all" : "whole run", 4, height / 2);
  }

  sums(bins) {
    const { graph, timed, lanes } = this.timeline;
    if (this.of === timed && this.bins === bins) return this.found;
    this.of = timed;
    this.bins = bins;
    this.found = new Float32Array(bins * PAINTS.length);
    const shown = lanes.all.some((lane) => lane.isCompute);
    this.lanes = 0;
    for (const lane of lanes.all) {
      if (lane.isCompute !== shown) continue;
      this.lanes++;
      lanes.addUp(lane, 0, timed, this.found, 0, bins / timed.total);
    }
    return this.found;
  }
}
