// The rows of the timeline: tasks of each lane in order, and what each task's time is made of.

/** The colours of tasks: solid is work, hatched is waiting. */
const SOLID = ["forward", "backward", "input", "pause", "work", "reduce", "gather", "latency", "update"];
const HATCHED = ["wait", "peers"];
const PAINTS = [...SOLID, ...HATCHED];
const PAINT = Object.fromEntries(PAINTS.map((name, at) => [name, at]));
const PAINT_WORDS = {
  forward: "forward",
  backward: "backward",
  input: "input",
  pause: "pause, evaluation, checkpoint",
  work: "handling: messages, sums, copies, own code",
  reduce: "exchange: reduce",
  gather: "exchange: gather and others",
  latency: "latency",
  update: "update",
  wait: "compute lane waits",
  peers: "comm lane waits for other ranks",
};

class Lanes {
  constructor(graph) {
    this.graph = graph;
    const { facts } = graph;
    this.names = facts.kinds.map(([, kind]) => kind);
    this.isCompute = facts.kinds.map(([lane]) => lane === "compute");
    this.paintOfKind = facts.kinds.map(([lane, kind]) => paintOfKind(lane, kind));
    this.used = new Set();
    this.lay();
    for (const kind of graph.kind) this.used.add(this.paintOfKind[kind]);
    if (!this.all.every((lane) => lane.isCompute)) {
      for (let i = 0; i < graph.n; i++) {
        const t = graph.task[i];
        if (t >= 0 && !this.isCompute[graph.kind[t]] && graph.cost[i] > 0) {
          const paint = this.paintOf(graph.kind[t], graph.kindOf[i]);
          if (paint >= 0) this.used.add(paint);
        }
      }
    }
  }

  /** The paint of a cost within a task of the comm lane of a kind; -1 if it is waiting. */
  paintOf(kind, kindOfCost) {
    const name = this.graph.facts.classes[kindOfCost];
    if (name === "between") return -1;
    if (name === "update" || name === "latency" || name === "forward" || name === "backward") return PAINT[name];
    if (name === "wire" || name === "inside") {
      return this.names[kind] === "reduce" ? PAINT.reduce : PAINT.gather;
    }
    return PAINT.work;
  }

  lay() {
    const { graph } = this;
    const { times } = graph.recorded;
    const rows = new Map();
    this.level = new Uint8Array(graph.rank.length);
    for (let t = 0; t < graph.rank.length; t++) {
      const key = graph.rank[t] * 2 + (this.isCompute[graph.kind[t]] ? 0 : 1);
      if (!rows.has(key)) rows.set(key, []);
      rows.get(key).push(t);
    }
    this.all = [...rows.keys()].sort((a, b) => a - b).map((key) => {
      const tasks = rows.get(key);
      const starts = tasks.map((t) => times[graph.start[t]]);
      if (starts.some((s, k) => k && s < starts[k - 1])) {
        tasks.sort((a, b) => times[graph.start[a]] - times[graph.start[b]] || a - b);
      }
      return { rank: key >> 1, isCompute: key % 2 === 0, tasks: Int32Array.from(tasks), levels: this.stack(tasks) };
    });
    this.rowOf = new Map(this.all.map((lane, at) => [lane.rank * 2 + (lane.isCompute ? 0 : 1), at]));
  }

  /** Tasks of one lane that overlap lie above each other. */
  stack(tasks) {
    const { graph } = this;
    const { times } = graph.recorded;
    const free = [];
    for (const t of tasks) {
      const from = times[graph.start[t]] + 1e-7;
      let level = free.findIndex((end) => end <= from);
      if (level < 0) level = Math.min(free.length, 3);
      free[level] = times[graph.end[t]];
      this.level[t] = level;
    }
    return Math.max(1, free.length);
  }

  row(t) {
    return this.rowOf.get(this.graph.rank[t] * 2 + (this.isCompute[this.graph.kind[t]] ? 0 : 1));
  }

  /** Call `draw(paint, from, to)` for each piece of a task's time, waiting first. */
  pieces(t, timed, draw) {
    const { graph } = this;
    const from = timed.times[graph.start[t]];
    const to = timed.times[graph.end[t]];
    if (this.isCompute[graph.kind[t]]) {
      draw(this.paintOfKind[graph.kind[t]], from, to);
      return;
    }
    draw(PAINT.peers, from, to);
    for (const i of graph.momentsOf(t)) {
      const cost = timed.cost[i];
      const end = Math.min(to, timed.times[i]);
      const start = Math.max(from, timed.times[i] - cost);
      if (cost > 0 && end > start) {
        const paint = this.paintOf(graph.kind[t], graph.kindOf[i]);
        if (paint >= 0) draw(paint, start, end);
      }
    }
  }

  /** By kind of a task and class of a cost: its paint; -1 for waiting. */
  get paintTable() {
    if (!this.table) {
      const { facts } = this.graph;
      const classes = facts.classes.length;
      this.table = new Int8Array(facts.kinds.length * classes);
      facts.kinds.forEach((_, kind) => {
        for (let one = 0; one < classes; one++) this.table[kind * classes + one] = this.paintOf(kind, one);
      });
    }
    return this.table;
  }

  /**
   * Add up what the tasks of a lane, from the `first` on, spent their time on, in bins of time.
   * Many tasks are looked at here: no function is called for each, and nothing is made.
   */
  addUp(lane, first, timed, sums, from, scale) {
    const { graph, paintTable } = this;
    const { start, end, kind, kindOf } = graph;
    const { times, cost } = timed;
    const [head, list] = graph.momentLists();
    const kinds = PAINTS.length;
    const bins = sums.length / kinds;
    const classes = graph.facts.classes.length;
    for (let k = first; k < lane.tasks.length; k++) {
      const t = lane.tasks[k];
      const a = (times[start[t]] - from) * scale;
      const b = (times[end[t]] - from) * scale;
      if (a > bins) break;
      if (lane.isCompute) {
        spread(sums, kinds, this.paintOfKind[kind[t]], a, b, 1);
        continue;
      }
      let waits = b - a;
      for (let m = head[t]; m < head[t + 1]; m++) {
        const i = list[m];
        if (!(cost[i] > 0)) continue;
        const paint = paintTable[kind[t] * classes + kindOf[i]];
        if (paint < 0) continue;
        const to = (times[i] - from) * scale;
        const low = Math.max(a, to - cost[i] * scale);
        const high = Math.min(b, to);
        if (high <= low) continue;
        waits -= high - low;
        spread(sums, kinds, paint, low, high, 1);
      }
      if (waits > 0 && b > a) spread(sums, kinds, PAINT.peers, a, b, Math.min(1, waits / (b - a)));
    }
  }

  name(t) {
    const { graph } = this;
    const bucket = graph.bucket[t] >= 0 ? ` of bucket ${graph.bucket[t]}` : "";
    return `rank ${graph.rank[t]}, ${this.names[graph.kind[t]]}${bucket}, step ${graph.step[t]}`;
  }

  /** What fits into a bar. */
  brief(t) {
    const { graph } = this;
    const name = { forward: "fwd", backward: "bwd" }[this.names[graph.kind[t]]] ?? this.names[graph.kind[t]];
    return graph.bucket[t] >= 0 ? `${name} ${graph.bucket[t]}` : name;
  }
}

function paintOfKind(lane, kind) {
  if (lane !== "compute") return PAINT.peers;
  if (kind === "wait") return PAINT.wait;
  if (kind === "split") return PAINT.backward;
  if (kind in PAINT) return PAINT[kind];
  return ["evaluate", "checkpoint", "whole", "report"].includes(kind) ? PAINT.pause : PAINT.work;
}
