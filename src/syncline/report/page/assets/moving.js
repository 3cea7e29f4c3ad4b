// Moves and zooms the timeline, by pointer and by keyboard, and says what a task was.

class Moving {
  constructor(timeline, overview) {
    this.timeline = timeline;
    this.overview = overview;
    this.isQueued = false;
    this.listen();
    this.listenToOverview();
  }

  redraw() {
    if (this.isQueued) return;
    this.isQueued = true;
    requestAnimationFrame(() => {
      this.isQueued = false;
      this.drawNow();
    });
  }

  drawNow() {
    this.timeline.draw();
    this.overview.draw();
  }

  /** Show a stretch of time, at most the whole run. */
  show(from, to) {
    const { timeline } = this;
    const { total } = timeline.timed;
    const span = Math.min(Math.max(to - from, total * 2e-7, 1e-8), total * 1.02);
    timeline.from = Math.max(-0.01 * total, Math.min(from, total * 1.01 - span));
    timeline.to = timeline.from + span;
    this.redraw();
  }

  zoom(factor, at = (this.timeline.from + this.timeline.to) / 2) {
    const { from, to } = this.timeline;
    this.show(at - (at - from) * factor, at + (to - at) * factor);
  }

  pan(part) {
    const { from, to } = this.timeline;
    const by = (to - from) * part;
    this.show(from + by, to + by);
  }

  showSteps(first, count) {
    const { timed, graph } = this.timeline;
    const ends = [...graph.stepEnds.values()];
    if (!ends.length) {
      this.show(0, timed.total);
      return;
    }
    const last = Math.min(...ends.map((one) => one.length)) - 1;
    const begin = Math.max(0, Math.min(first, last));
    const from = begin > 0 ? Math.min(...ends.map((one) => timed.times[one[begin - 1]])) : 0;
    const to = Math.max(...ends.map((one) => timed.times[one[Math.min(last, begin + count - 1)]]));
    const edge = (to - from) * 0.02;
    this.show(from - edge, to + edge);
  }

  stepInView() {
    const { timed, graph, from, to } = this.timeline;
    const ends = [...graph.stepEnds.values()][0] ?? [];
    const found = ends.findIndex((moment) => timed.times[moment] >= (from + to) / 2);
    return found < 0 ? Math.max(0, ends.length - 1) : found;
  }

  showSlowest() {
    const { timed, graph } = this.timeline;
    const count = timed.stepTimes.length / Math.max(1, graph.stepEnds.size);
    let slowest = 0;
    timed.stepTimes.forEach((time, k) => {
      if (time > timed.stepTimes[slowest]) slowest = k;
    });
    this.showSteps((slowest % count) + 1, 1);
  }

  /** The task at a place of the picture; -1 if there is none. */
  taskAt(x, y) {
    const { timeline } = this;
    const { graph, timed, lanes } = timeline;
    const time = timeline.time(x);
    const slack = 2 / timeline.scale;
    if (y > AXIS - 2 && y < AXIS + TRACK + 4) {
      return timeline.stretches().find((one) => one.from <= time && time <= one.to)?.t ?? -1;
    }
    for (let row = 0; row < lanes.all.length; row++) {
      const top = timeline.top(row);
      if (y < top || y >= top + timeline.height(row)) continue;
      const lane = lanes.all[row];
      const level = Math.floor(((y - top) / (timeline.height(row) - 3)) * lane.levels);
      let best = -1;
      for (let k = timeline.firstSeen(lane); k < lane.tasks.length; k++) {
        const t = lane.tasks[k];
        if (timed.times[graph.start[t]] - slack > time) break;
        const isHere = time <= timed.times[graph.end[t]] + slack;
        if (isHere && (lane.levels === 1 || lanes.level[t] === level)) best = t;
      }
      return best;
    }
    return -1;
  }

  /** Say what a task did, in HTML: names of tasks are the program's own words. */
  words(t) {
    const { graph, timed, lanes } = this.timeline;
    const from = timed.times[graph.start[t]];
    const to = timed.times[graph.end[t]];
    let waits = to - from;
    lanes.pieces(t, timed, (paint, a, b) => {
      if (paint < SOLID.length) waits -= b - a;
    });
    let words = `<b>${lanes.name(t)}</b>: ${seconds(to - from)}, from ${seconds(from)}`;
    if (waits > 1e-8) words += `; ${seconds(waits)} of it waiting`;
    if (graph.isOnPath(t, timed)) words += `; <b class="onpath">on the critical path</b>`;
    return words;
  }

  choose(t) {
    const { timeline } = this;
    timeline.chosen = t;
    const reasons = t < 0 ? [] : timeline.graph.reasons(t, timeline.timed).slice(0, 3);
    const names = reasons.map((one) => timeline.lanes.name(one));
    const after = names.length ? `<br><span class="soft">came after: ${names.join("; ")}</span>` : "";
    $("chosen").innerHTML = t < 0 ? HINT : this.words(t) + after;
    this.redraw();
  }

  /** Go along the critical path. */
  along(direction) {
    const { timeline } = this;
    const list = timeline.stretches();
    if (!list.length) return;
    const middle = (timeline.from + timeline.to) / 2;
    let at = list.findIndex((one) => one.t === timeline.chosen);
    if (at < 0) at = list.findIndex((one) => one.to >= middle);
    else {
      const { t } = list[at];
      while (list[at] && list[at].t === t) at += direction;
    }
    const one = list[Math.max(0, Math.min(list.length - 1, at))];
    if (one.to > timeline.to || one.from < timeline.from) {
      const span = timeline.to - timeline.from;
      this.show((one.from + one.to) / 2 - span / 2, (one.from + one.to) / 2 + span / 2);
    }
    this.choose(one.t);
  }

  listen() {
    const { canvas } = this.timeline;
    let drag = null;
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    canvas.addEventListener("pointerdown", (event) => {
      const { from, to } = this.timeline;
      const start = event.shiftKey ? this.timeline.time(place(event)[0]) : null;
      drag = { x: event.clientX, from, to, start, isMoved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!drag) {
        this.tip(event, this.taskAt(...place(event)));
        return;
      }
      const by = event.clientX - drag.x;
      drag.isMoved ||= Math.abs(by) > 3;
      if (drag.start === null && drag.isMoved) {
        const shift = by / this.timeline.scale;
        this.show(drag.from - shift, drag.to - shift);
      }
    });
    canvas.addEventListener("pointerup", (event) => {
      if (drag && !drag.isMoved) this.choose(this.taskAt(...place(event)));
      else if (drag && drag.start !== null) {
        const end = this.timeline.time(place(event)[0]);
        this.show(Math.min(drag.start, end), Math.max(drag.start, end));
      }
      drag = null;
    });
    canvas.addEventListener("pointercancel", () => (drag = null));
    canvas.addEventListener("pointerleave", () => this.tip(null, -1));
    canvas.addEventListener("dblclick", (event) => this.zoom(0.4, this.timeline.time(place(event)[0])));
    canvas.addEventListener("wheel", (event) => this.wheel(event, place(event)[0]), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  /** The plain wheel scrolls the page, as everywhere. */
  wheel(event, x) {
    const isZoom = event.ctrlKey || event.metaKey;
    if (!isZoom && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
    event.preventDefault();
    if (isZoom) this.zoom(Math.exp(event.deltaY * 0.003), this.timeline.time(x));
    else this.pan(event.deltaX / this.timeline.width);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = {
      ArrowLeft: () => this.pan(-0.2),
      a: () => this.pan(-0.2),
      ArrowRight: () => this.pan(0.2),
      d: () => this.pan(0.2),
      ArrowUp: () => this.zoom(0.7),
      w: () => this.zoom(0.7),
      "+": () => this.zoom(0.7),
      ArrowDown: () => this.zoom(1.4),
      s: () => this.zoom(1.4),
      "-": () => this.zoom(1.4),
      0: () => this.show(0, Infinity),
      "[": () => this.showSteps(this.stepInView() - 1, 1),
      "]": () => this.showSteps(this.stepInView() + 1, 1),
      n: () => this.along(1),
      p: () => this.along(-1),
      Escape: () => this.choose(-1),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  tip(event, t) {
    const box = $("tip");
    box.hidden = t < 0;
    if (t < 0) return;
    box.innerHTML = this.words(t);
    box.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - 310))}px`;
    box.style.top = `${event.clientY + 16}px`;
  }

  listenToOverview() {
    const { canvas } = this.overview;
    let isDown = false;
    const jump = (event) => {
      const { timeline } = this;
      const box = canvas.getBoundingClientRect();
      const part = (event.clientX - box.left - timeline.gutter) / (box.width - timeline.gutter);
      const span = timeline.to - timeline.from;
      this.show(part * timeline.timed.total - span / 2, part * timeline.timed.total + span / 2);
    };
    canvas.addEventListener("pointerdown", (event) => {
      isDown = true;
      canvas.setPointerCapture(event.pointerId);
      jump(event);
    });
    canvas.addEventListener("pointermove", (event) => isDown && jump(event));
    canvas.addEventListener("pointerup", () => (isDown = false));
  }
}

const HINT =
  "<span class='soft'>Click a task to see what it came after. Drag to move, shift-drag or double-click to zoom. " +
  "Keys: arrows or W A S D move and zoom, [ and ] go by steps, N and P go along the critical path, 0 shows everything.</span>";
