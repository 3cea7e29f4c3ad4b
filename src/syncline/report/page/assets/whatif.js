// What if: sliders and buttons that time the recorded graph again, and what they say.

const RESOURCES = {
  compute: ["backward", "compute"],
  stragglers: ["stragglers", "slow ranks"],
  wire: ["wire", "wire"],
  latency: ["latency", "latency"],
  inside: ["inside", "inside machines"],
  update: ["update", "update"],
  input: ["input", "input"],
  between: ["other", "between tasks"],
};

class WhatIf {
  /** `onAnswer` is called with each answer. */
  constructor(onAnswer) {
    this.onAnswer = onAnswer;
    this.knobs = [...document.querySelectorAll("[data-knob]")];
    for (const knob of this.knobs) knob.addEventListener("input", () => this.ask());
    $("w-reset").addEventListener("click", () => this.set({}));
    document.addEventListener("click", (event) => {
      const button = event.target.closest("[data-edit]");
      if (button) this.set(JSON.parse(button.dataset.edit));
    });
  }

  open(graph) {
    this.graph = graph;
    const used = new Set();
    for (let i = 0; i < graph.n; i++) if (graph.cost[i]) used.add(graph.facts.classes[graph.kindOf[i]]);
    for (const knob of this.knobs) {
      const needs = knob.dataset.classes.split(" ");
      knob.closest("label").hidden = !needs.some((name) => used.has(name));
    }
    this.set({});
  }

  /** The edit that the knobs stand for: a factor for each class of costs. */
  get edit() {
    const factors = {};
    let noStragglers = false;
    for (const knob of this.knobs) {
      const factor = factorOf(knob);
      if (knob.dataset.knob === "stragglers") noStragglers = knob.checked;
      else if (factor !== 1) for (const name of knob.dataset.classes.split(" ")) factors[name] = factor;
    }
    return { factors, noStragglers };
  }

  /** Set the knobs to an edit. */
  set({ factors = {}, noStragglers = false }) {
    for (const knob of this.knobs) {
      const factor = factors[knob.dataset.classes.split(" ")[0]] ?? 1;
      if (knob.dataset.knob === "stragglers") knob.checked = noStragglers;
      else if (knob.type === "checkbox") knob.checked = factor === 0;
      else knob.value = knob.dataset.knob === "rate" ? -Math.log2(factor) : factor;
    }
    this.ask();
  }

  ask() {
    for (const knob of this.knobs) {
      const output = knob.closest("label").querySelector("output");
      if (!output) continue;
      const value = knob.dataset.knob === "rate" ? 1 / factorOf(knob) : factorOf(knob);
      output.textContent = Number.isFinite(value) ? `${three(value)}×` : "free";
    }
    const { edit } = this;
    const isChanged = edit.noStragglers || Object.keys(edit.factors).length > 0;
    const timed = isChanged ? this.graph.whatIf(edit) : this.graph.recorded;
    this.say(timed, isChanged);
    this.onAnswer(timed, isChanged);
  }

  say(timed, isChanged) {
    const { graph } = this;
    const { recorded } = graph;
    const gain = recorded.step ? 1 - timed.step / recorded.step : 0;
    const size = share(Math.abs(gain));
    const change = Math.abs(gain) < 5e-5 ? "no change" : gain > 0 ? `${size} less` : `${size} more`;
    $("answer").innerHTML = isChanged
      ? `${seconds(recorded.step)} → ${seconds(timed.step)} a step: <b class="${gain < 0 ? "worse" : ""}">${change}</b>`
      : `${seconds(recorded.step)} a step, as recorded`;
    const tasks = graph.rank.length.toLocaleString("en");
    const rough = graph.facts.rough ? ` Rough: ${graph.facts.rough}.` : "";
    $("retimed").textContent = isChanged
      ? `${tasks} tasks timed again in ${timed.took.toFixed(1)} ms, in this page.${rough}`
      : `Move a slider or press a bar: the ${tasks} recorded tasks are timed again in this page.`;
    const longest = Math.max(recorded.total, timed.total);
    $("paths").innerHTML =
      this.row("recorded", recorded, longest) + (isChanged ? this.row("changed", timed, longest) : "");
    this.answer = { step_s: timed.step, run_s: timed.total, gain, took_ms: timed.took, isChanged };
  }

  /** The critical path of a run as a bar: what it is made of. */
  row(name, timed, longest) {
    const { shares } = this.graph.path(timed);
    const order = [...Object.keys(RESOURCES).filter((one) => one in shares)];
    order.push(...Object.keys(shares).filter((one) => !(one in RESOURCES)));
    const bits = order.map((one) => {
      const [css, words] = RESOURCES[one] ?? [["pause", "evaluate", "checkpoint", "whole", "report"].includes(one) ? "pause" : "work", one];
      const width = (100 * shares[one] * timed.total) / longest;
      if (width < 0.05) return "";
      const key = timed === this.graph.recorded ? ` data-key="path.shares.${one}"` : "";
      const text = `${words} <data${key} value="${shares[one]}">${share(shares[one])}</data>`;
      return `<i class="k-${css}" style="width:${width}%" title="${words} ${share(shares[one])}">${width > 4 ? `<span class="fits-${room(`${words} ${share(shares[one])}`)}">${text}</span>` : ""}</i>`;
    });
    return `<div class="rowbar"><span>${name}</span><div class="bar">${bits.join("")}</div><span>${seconds(timed.total)}</span></div>`;
  }
}

/** How wide a bar has to be for words to fit into it: as markup.py has it. */
function room(words) {
  return Math.min(380, Math.max(40, 20 * Math.ceil((7.4 * words.length + 18) / 20)));
}

function factorOf(knob) {
  if (knob.type === "checkbox") return knob.checked ? 0 : 1;
  if (knob.dataset.knob === "rate") return 2 ** -Number(knob.value);
  return Number(knob.value);
}
