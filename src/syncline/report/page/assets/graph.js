// A recorded run as a graph that is timed again with other costs. The same sums as in
// perf/moments.py, perf/what_if.py and perf/critical_path.py, on the same arrays.

class Graph {
  constructor(facts, bytes) {
    const n = facts.moments;
    const columns = new Columns(bytes);
    this.facts = facts;
    this.n = n;
    this.number = Object.fromEntries(facts.classes.map((name, i) => [name, i]));
    this.first = columns.plain(new Int32Array(n));
    this.second = columns.signed(new Int32Array(n));
    for (let i = 0; i < n; i++) {
      this.first[i] = i - this.first[i];
      this.second[i] = this.first[i] - this.second[i];
    }
    this.cost = columns.signed(new Float64Array(n));
    for (let i = 0; i < n; i++) this.cost[i] *= facts.tick;
    this.kindOf = columns.plain(new Uint8Array(n));
    this.task = columns.running(new Int32Array(n));
    this.readTasks(facts.tasks, columns);
    this.readSteps(facts.stepEnds, columns);
    this.readCompute();
    this.recorded = this.timed(this.cost);
  }

  readTasks(count, columns) {
    this.rank = columns.running(new Int32Array(count));
    this.step = columns.running(new Int32Array(count));
    this.kind = columns.plain(new Uint8Array(count));
    this.bucket = columns.plain(new Int32Array(count));
    for (let t = 0; t < count; t++) this.bucket[t]--;
    this.start = columns.running(new Int32Array(count));
    this.end = columns.signed(new Int32Array(count));
    for (let t = 0; t < count; t++) this.end[t] += this.start[t];
  }

  /** By rank that computes: the moments at which its steps end. */
  readSteps(count, columns) {
    const [rank, step, moment] = [0, 1, 2].map(() => columns.running(new Int32Array(count)));
    this.stepEnds = new Map();
    this.firstStep = count ? step[0] : 0;
    for (let k = 0; k < count; k++) {
      if (!this.stepEnds.has(rank[k])) this.stepEnds.set(rank[k], []);
      this.stepEnds.get(rank[k]).push(moment[k]);
      this.firstStep = Math.min(this.firstStep, step[k]);
    }
  }

  /** By moment: where its rank's compute in its step is summed up; -1 if it is no compute. */
  readCompute() {
    const { n, kindOf, task, rank, step, number } = this;
    const ranks = new Map();
    let steps = 0;
    this.cell = new Int32Array(n).fill(-1);
    for (let t = 0; t < step.length; t++) steps = Math.max(steps, step[t] + 1);
    for (let i = 0; i < n; i++) {
      if (kindOf[i] !== number.forward && kindOf[i] !== number.backward) continue;
      const its = rank[task[i]];
      if (!ranks.has(its)) ranks.set(its, ranks.size);
      this.cell[i] = ranks.get(its) * steps + step[task[i]];
    }
    this.numSteps = steps;
    this.numRanks = ranks.size;
  }

  /** When each moment comes: the latest of the two before it, and its cost. */
  times(cost) {
    const { n, first, second } = this;
    const times = new Float64Array(n);
    for (let i = 1; i < n; i++) {
      const a = times[first[i]];
      const b = times[second[i]];
      times[i] = (a > b ? a : b) + cost[i];
    }
    return times;
  }

  /** Costs after an edit: factors by class, then the median rank's compute, step by step. */
  edited({ factors = {}, noStragglers = false }) {
    const { n, kindOf, number, cell } = this;
    const table = new Float64Array(this.facts.classes.length).fill(1);
    for (const [name, factor] of Object.entries(factors)) table[number[name]] = factor;
    const cost = new Float64Array(n);
    for (let i = 1; i < n; i++) cost[i] = this.cost[i] * table[kindOf[i]];
    if (noStragglers) {
      const { sums, typical } = this.compute(cost);
      for (let i = 1; i < n; i++) {
        if (cell[i] >= 0 && sums[cell[i]] > 0) {
          cost[i] *= typical[cell[i] % this.numSteps] / sums[cell[i]];
        }
      }
    }
    return cost;
  }

  /** Each rank's compute in each step, and that of the median rank that computes in it. */
  compute(cost) {
    const { n, cell, numSteps, numRanks } = this;
    const sums = new Float64Array(numSteps * numRanks);
    for (let i = 0; i < n; i++) if (cell[i] >= 0) sums[cell[i]] += cost[i];
    const typical = new Float64Array(numSteps);
    for (let s = 0; s < numSteps; s++) {
      const column = [];
      for (let r = 0; r < numRanks; r++) if (sums[r * numSteps + s] > 0) column.push(sums[r * numSteps + s]);
      typical[s] = median(column);
    }
    return { sums, typical };
  }

  /** A run with these costs. */
  timed(cost) {
    const began = performance.now();
    const times = this.times(cost);
    const took = performance.now() - began;
    let end = this.facts.lasts[0];
    for (const one of this.facts.lasts) if (times[one] > times[end]) end = one;
    return { times, cost, end, took, total: times[end], ...this.steps(times) };
  }

  whatIf(edit) {
    const began = performance.now();
    const timed = this.timed(this.edited(edit));
    timed.took = performance.now() - began;
    return timed;
  }

  /** Times of steps, from the end of a step to the end of the next; and their mean. */
  steps(times) {
    const ends = [...this.stepEnds.values()];
    const count = Math.min(...ends.map((one) => one.length));
    const found = [];
    for (const one of ends) {
      if (count < 2) found.push(times[one[0]] - times[0]);
      for (let k = 1; k < count; k++) found.push(times[one[k]] - times[one[k - 1]]);
    }
    return { stepTimes: found, step: found.length ? found.reduce((a, b) => a + b, 0) / found.length : 0 };
  }

  /** The moments on the critical path, in order, and its shares by resource. */
  path(timed) {
    if (timed.path) return timed.path;
    const { first, second, kindOf, cell, facts } = this;
    const { times } = timed;
    const moments = [timed.end];
    for (let i = timed.end; i; ) {
      i = times[first[i]] >= times[second[i]] ? first[i] : second[i];
      moments.push(i);
    }
    moments.reverse();
    const { sums, typical } = this.compute(timed.cost);
    const shares = {};
    const add = (name, value) => (shares[name] = (shares[name] ?? 0) + value);
    for (let k = 1; k < moments.length; k++) {
      const i = moments[k];
      const taken = times[i] - times[moments[k - 1]];
      if (cell[i] < 0) {
        add(facts.classes[kindOf[i]], taken);
        continue;
      }
      const whole = sums[cell[i]];
      const beyond = whole ? Math.max(0, 1 - typical[cell[i] % this.numSteps] / whole) : 0;
      add("stragglers", taken * beyond);
      add("compute", taken * (1 - beyond));
    }
    for (const name of Object.keys(shares)) {
      if (shares[name] <= 0) delete shares[name];
      else shares[name] /= times[timed.end] || 1;
    }
    timed.path = { moments, shares };
    return timed.path;
  }

  /** The tasks that a task waited for: those of the later moments before its own, the last first. */
  reasons(t, timed) {
    const { first, second, task } = this;
    const { times } = timed;
    const found = new Map();
    for (const i of [this.start[t], ...this.momentsOf(t)]) {
      const later = times[first[i]] >= times[second[i]] ? first[i] : second[i];
      const other = task[later];
      if (other >= 0 && other !== t && times[later] <= times[this.end[t]]) found.set(other, times[later]);
    }
    return [...found.keys()].sort((a, b) => found.get(b) - found.get(a));
  }

  /** Whether all that follows a task waited for it: whether the critical path goes through it. */
  isOnPath(t, timed) {
    if (!timed.onPath) {
      timed.onPath = new Uint8Array(this.rank.length);
      for (const i of this.path(timed).moments) if (this.task[i] >= 0) timed.onPath[this.task[i]] = 1;
    }
    return timed.onPath[t] === 1;
  }

  /** The moments of each task: where those of a task begin in a list, and the list. */
  momentLists() {
    if (!this.momentHead) {
      const count = this.rank.length;
      this.momentHead = new Int32Array(count + 1);
      for (let i = 0; i < this.n; i++) if (this.task[i] >= 0) this.momentHead[this.task[i] + 1]++;
      for (let k = 0; k < count; k++) this.momentHead[k + 1] += this.momentHead[k];
      const fill = this.momentHead.slice();
      this.momentList = new Int32Array(this.momentHead[count]);
      for (let i = 0; i < this.n; i++) if (this.task[i] >= 0) this.momentList[fill[this.task[i]]++] = i;
    }
    return [this.momentHead, this.momentList];
  }

  momentsOf(t) {
    const [head, list] = this.momentLists();
    return list.subarray(head[t], head[t + 1]);
  }
}

function median(values) {
  if (!values.length) return 0;
  values.sort((a, b) => a - b);
  const half = values.length >> 1;
  return values.length % 2 ? values[half] : (values[half - 1] + values[half]) / 2;
}
