// Draws the timeline: two lanes a rank, and the critical path.

const AXIS = 44;
const TRACK = 18;
const TOP = AXIS + TRACK + 12;

class Timeline {
  constructor(canvas) {
    this.canvas = canvas;
    this.from = 0;
    this.to = 1;
    this.chosen = -1;
    this.showsPath = true;
    this.ink = {};
  }

  open(graph, lanes) {
    this.graph = graph;
    this.lanes = lanes;
    this.timed = graph.recorded;
    this.chosen = -1;
    this.isNarrow = this.canvas.clientWidth < 560;
  }

  get gutter() {
    return this.canvas.clientWidth < 560 ? 40 : 84;
  }

  get rowHeight() {
    const ranks = new Set(this.lanes.all.map((lane) => lane.rank)).size;
    return ranks <= 4 ? 26 : ranks <= 10 ? 20 : ranks <= 32 ? 12 : 7;
  }

  /** The height of a row: a lane on which tasks lie above each other is higher. */
  height(row) {
    return Math.round(this.rowHeight * (1 + 0.42 * (this.lanes.all[row].levels - 1)));
  }

  /** The top of a row; rows of one rank lie together. */
  top(row) {
    if (this.topsFor !== this.lanes || this.topsHeight !== this.rowHeight) {
      let y = TOP;
      this.tops = this.lanes.all.map((lane, at) => {
        if (at && this.lanes.all[at - 1].rank !== lane.rank) y += 6;
        y += this.height(at);
        return y - this.height(at);
      });
      this.topsFor = this.lanes;
      this.topsHeight = this.rowHeight;
    }
    return this.tops[row];
  }

  x(time) {
    return this.gutter + (time - this.from) * this.scale;
  }

  time(x) {
    return this.from + (x - this.gutter) / this.scale;
  }

  draw() {
    if (!this.graph) return;
    const tall = this.top(this.lanes.all.length - 1) + this.height(this.lanes.all.length - 1) + 8;
    const [pen, width] = sized(this.canvas, tall);
    this.pen = pen;
    this.width = width;
    this.tall = tall;
    this.scale = (width - this.gutter) / (this.to - this.from);
    pen.fillStyle = this.ink.panel;
    pen.fillRect(0, 0, width, tall);
    pen.textBaseline = "middle";
    this.drawTicks();
    pen.save();
    pen.beginPath();
    pen.rect(this.gutter, 0, width - this.gutter, tall);
    pen.clip();
    this.drawSteps();
    const perStep = (this.timed.total / Math.max(1, this.numSteps)) * this.scale;
    this.isFar = perStep < 40;
    for (let row = 0; row < this.lanes.all.length; row++) {
      if (this.isFar) this.drawFar(row);
      else this.drawLane(row);
    }
    if (this.showsPath) {
      if (this.isFar) this.drawFarPath();
      else this.drawPath();
    }
    if (this.chosen >= 0) this.drawChosen();
    pen.restore();
    this.drawGutter();
  }

  get numSteps() {
    return [...this.graph.stepEnds.values()][0]?.length ?? 1;
  }

  font(weight, size) {
    this.pen.font = `${weight} ${size}px ${this.ink.sans}`;
  }

  drawTicks() {
    const { pen, ink } = this;
    const raw = (this.to - this.from) / Math.max(2, (this.width - this.gutter) / 90);
    const power = 10 ** Math.floor(Math.log10(raw));
    const tick = [1, 2, 5, 10].map((m) => m * power).find((one) => one >= raw);
    this.font(400, 12);
    pen.textAlign = "center";
    pen.fillStyle = ink.soft;
    const unit = this.to < 1e-3 ? [1e6, "µs"] : this.to < 1 ? [1e3, "ms"] : [1, "s"];
    const digits = Math.max(0, Math.min(9, -Math.floor(Math.log10(tick * unit[0]) + 1e-9)));
    for (let at = Math.ceil(this.from / tick) * tick; at <= this.to; at += tick) {
      const x = this.x(at);
      const words = `${(at * unit[0]).toFixed(digits)} ${unit[1]}`.replace(/^-0(\.0*)? /, "0 ");
      const half = pen.measureText(words).width / 2 + 4;
      if (x > this.gutter + half && x < this.width - half) pen.fillText(words, x, 11);
    }
  }

  /** The steps of the first rank, as a band. */
  drawSteps() {
    const { pen, ink, timed, graph } = this;
    const ends = [...graph.stepEnds.values()][0] ?? [];
    this.font(400, 12);
    pen.textAlign = "center";
    ends.forEach((moment, k) => {
      const from = k ? this.x(timed.times[ends[k - 1]]) : this.x(0);
      const to = this.x(timed.times[moment]);
      if (to < this.gutter || from > this.width) return;
      if (k % 2 === 0) {
        pen.fillStyle = ink.grid;
        pen.fillRect(from, AXIS - 22, to - from, 17);
      }
      if (to - from > 24) {
        pen.fillStyle = ink.line;
        pen.fillRect(to, AXIS - 22, 1, this.tall);
      }
      const [a, b] = [Math.max(from, this.gutter), Math.min(to, this.width)];
      if (b - a > 54) {
        pen.fillStyle = ink.soft;
        pen.fillText(`step ${graph.firstStep + k}`, (a + b) / 2, AXIS - 13);
      }
    });
  }

  /** The place of the first task of a row that may be seen. */
  firstSeen(lane) {
    const { graph, timed } = this;
    let low = 0;
    let high = lane.tasks.length;
    while (low < high) {
      const mid = (low + high) >> 1;
      if (timed.times[graph.start[lane.tasks[mid]]] < this.from) low = mid + 1;
      else high = mid;
    }
    return Math.max(0, low - 8);
  }

  drawLane(row) {
    const { pen, ink, graph, timed, lanes } = this;
    const lane = lanes.all[row];
    const top = this.top(row);
    const each = (this.height(row) - 3) / lane.levels;
    let lastPixel = -1;
    for (let k = this.firstSeen(lane); k < lane.tasks.length; k++) {
      const t = lane.tasks[k];
      const from = timed.times[graph.start[t]];
      const to = timed.times[graph.end[t]];
      if (from > this.to) break;
      if (to < this.from || to <= from) continue;
      const [a, b] = [this.x(from), this.x(to)];
      if (b - a < 1 && Math.floor(a) === lastPixel) continue;
      lastPixel = b - a < 1 ? Math.floor(a) : -1;
      const y = top + lanes.level[t] * each;
      const tall = each - (lane.levels > 1 ? 1 : 0);
      let shown = PAINT.peers;
      lanes.pieces(t, timed, (paint, start, end) => {
        const x = this.x(start);
        const wide = Math.max(0.8, this.x(end) - x - (b - a > 3 ? 0.7 : 0));
        pen.fillStyle = wide > 4 && ink.hatch[paint] ? ink.hatch[paint] : ink.paints[paint];
        pen.fillRect(x, y, wide, tall);
        if (end - start > (to - from) / 2) shown = paint;
      });
      if (b - a > 26 && tall >= 11) this.label(t, Math.max(a, this.gutter), Math.min(b, this.width), y, tall, shown);
    }
  }

  /** Write into a bar what it is, if that fits. */
  label(t, a, b, y, tall, paint) {
    const { pen, ink, lanes } = this;
    this.font(500, 11.5);
    const words = lanes.brief(t);
    const wide = pen.measureText(words).width;
    if (wide + 8 > b - a) return;
    pen.textAlign = "left";
    if (paint >= SOLID.length || this.isMixed(t)) {
      pen.globalAlpha = 0.88;
      pen.fillStyle = ink.panel;
      pen.fillRect(a + 2, y + 2, wide + 5, tall - 4);
      pen.globalAlpha = 1;
      pen.fillStyle = ink.ink;
    } else pen.fillStyle = ink.on[paint];
    pen.fillText(words, a + 4.5, y + tall / 2 + 0.5);
  }

  /** Whether a task waits and works: a label would lie on both. */
  isMixed(t) {
    return !this.lanes.isCompute[this.graph.kind[t]];
  }

  /** A lane from afar: what each pixel's time is made of, stacked. */
  drawFar(row) {
    const { timed, lanes } = this;
    const lane = lanes.all[row];
    const bins = Math.max(1, Math.ceil(this.width - this.gutter));
    const sums = new Float32Array(bins * PAINTS.length);
    lanes.addUp(lane, this.firstSeen(lane), timed, sums, this.from, this.scale);
    this.stackBins(sums, bins, this.top(row), this.height(row) - 3);
  }

  stackBins(sums, bins, top, tall) {
    const { pen, ink } = this;
    const below = new Float32Array(bins);
    for (let paint = 0; paint < PAINTS.length; paint++) {
      pen.fillStyle = ink.paints[paint];
      for (let p = 0; p < bins; p++) {
        const part = Math.min(1 - below[p], sums[p * PAINTS.length + paint]);
        if (part < 0.01) continue;
        pen.fillRect(this.gutter + p, top + tall * (1 - below[p] - part), 1.02, part * tall);
        below[p] += part;
      }
    }
  }

  drawGutter() {
    const { pen, ink } = this;
    const isNarrow = this.gutter < 50;
    pen.fillStyle = ink.panel;
    pen.fillRect(0, 0, this.gutter, this.tall);
    pen.fillStyle = ink.line;
    pen.fillRect(this.gutter - 1, 0, 1, this.tall);
    pen.textAlign = "left";
    pen.fillStyle = ink.path;
    this.font(600, 11);
    pen.fillText(isNarrow ? "path" : "critical path", 4, AXIS + TRACK / 2 + 1);
    this.lanes.all.forEach((lane, row) => {
      const isFirst = !row || this.lanes.all[row - 1].rank !== lane.rank;
      const y = this.top(row) + this.height(row) / 2 - 1;
      pen.fillStyle = isFirst ? ink.ink : ink.soft;
      this.font(isFirst ? 600 : 400, isFirst ? 12 : 11);
      const words = isFirst ? `${isNarrow ? "r" : "rank "}${lane.rank}` : "comm";
      if (this.rowHeight >= 14 || (isFirst && (this.rowHeight >= 10 || lane.rank % 4 === 0))) pen.fillText(words, 4, y);
    });
  }
}

/** Add a stretch of time to the pixels that it covers. */
function spread(sums, kinds, kind, from, to, weight) {
  const bins = sums.length / kinds;
  if (to < 0 || from >= bins) return;
  const first = Math.max(0, Math.floor(from));
  if (to <= first + 1) {
    sums[first * kinds + kind] += (to - Math.max(from, 0)) * weight;
    return;
  }
  for (let p = first; p < to && p < bins; p++) {
    sums[p * kinds + kind] += (Math.min(to, p + 1) - Math.max(from, p)) * weight;
  }
}

/** Give a canvas its size in the screen's own pixels; return its pen and its width. */
function sized(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  return [pen, width];
}
