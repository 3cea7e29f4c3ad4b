// The page: themes, the choice of a run, and what connects its parts.

const runs = [];
let timeline = null;
let moving = null;
let whatIf = null;
let wanted = 0; // the run that was asked for last: unpacking takes a moment

function readInk() {
  const style = getComputedStyle(document.documentElement);
  const ink = {};
  for (const name of ["panel", "bg", "ink", "soft", "line", "grid", "accent", "path", "other", "sans"]) {
    ink[name] = style.getPropertyValue(`--${name}`).trim();
  }
  ink.paints = PAINTS.map((name) => style.getPropertyValue(`--${name}`).trim());
  ink.on = PAINTS.map((name) => style.getPropertyValue(`--on-${name}`).trim() || ink.ink);
  ink.hatch = PAINTS.map((name, at) => (at < SOLID.length ? null : hatch(ink.paints[at], name === "peers")));
  return ink;
}

/** Solid is work, hatched is waiting: told without colour, and the two kinds by direction. */
function hatch(colour, isDown) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 7;
  const pen = tile.getContext("2d");
  pen.fillStyle = colour;
  pen.globalAlpha = 0.2;
  pen.fillRect(0, 0, 7, 7);
  pen.globalAlpha = 0.95;
  pen.strokeStyle = colour;
  pen.lineWidth = 1.5;
  pen.beginPath();
  for (const at of [-7, 0, 7]) {
    pen.moveTo(at, isDown ? 0 : 7);
    pen.lineTo(at + 7, isDown ? 7 : 0);
  }
  pen.stroke();
  return pen.createPattern(tile, "repeat");
}

function setTheme(isDark) {
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  if (!timeline) return;
  timeline.ink = readInk();
  moving.drawNow();
}

async function open(number) {
  if (!runs[number]) {
    const facts = JSON.parse($(`facts-${number}`).textContent);
    const graph = new Graph(facts, await unpack($(`data-${number}`).textContent));
    $(`data-${number}`).textContent = "";
    runs[number] = { graph, lanes: new Lanes(graph) };
  }
  return runs[number];
}

async function select(number) {
  wanted = number;
  for (const one of document.querySelectorAll("[data-run]")) one.hidden = Number(one.dataset.run) !== number;
  for (const one of document.querySelectorAll("[data-pick]")) {
    one.setAttribute("aria-pressed", String(Number(one.dataset.pick) === number));
  }
  for (const one of document.querySelectorAll("[data-traced]")) one.hidden = !$(`data-${number}`);
  for (const one of document.querySelectorAll("[data-pair]")) {
    one.hidden = !one.dataset.pair.split(" ").includes(String(number));
  }
  namePanels();
  for (const one of document.querySelectorAll("[data-of-run]")) one.dataset.of = String(number);
  if (!$(`data-${number}`)) return;
  const { graph, lanes } = await open(number);
  if (wanted !== number) return;
  timeline.open(graph, lanes);
  fillKey(lanes);
  $("shortened").hidden = !graph.facts.left;
  $("shortened").textContent =
    `This run is long: the timeline and the sliders leave out its last ${graph.facts.left} steps. All other figures are of the whole run.`;
  whatIf.open(graph);
  showTimes(false);
  moving.showSteps(Math.min(3, Math.max(0, graph.numSteps - 3)), 2);
  moving.choose(-1);
  moving.drawNow();
  document.documentElement.dataset.shown = String(number);
}

/** Let the links at the top go to the panels that are shown. */
function namePanels() {
  const shown = new Set();
  for (const panel of document.querySelectorAll("[data-panel]")) {
    const name = panel.dataset.panel;
    const isFirst = !panel.closest("[hidden]") && !shown.has(name);
    if (isFirst) shown.add(name);
    panel.id = isFirst ? name : "";
  }
  for (const link of document.querySelectorAll("nav a")) link.hidden = !shown.has(link.hash.slice(1));
}

function fillKey(lanes) {
  const names = [...lanes.used].sort((a, b) => a - b).map((paint) => PAINTS[paint]);
  if (!lanes.all.every((lane) => lane.isCompute)) names.push("peers");
  $("key").innerHTML = [...new Set(names)]
    .map((name) => `<li><i class="swatch k-${name}"></i>${PAINT_WORDS[name]}</li>`)
    .join("");
}

/** Show the recorded times, or those with other costs. */
function showTimes(isChanged) {
  timeline.timed = isChanged ? whatIf.timed : timeline.graph.recorded;
  $("t-changed").setAttribute("aria-pressed", String(isChanged));
  $("t-recorded").setAttribute("aria-pressed", String(!isChanged));
  moving.show(timeline.from, timeline.to);
}

function answered(timed, isChanged) {
  whatIf.timed = timed;
  $("t-changed").disabled = !isChanged;
  if ($("t-changed").getAttribute("aria-pressed") === "true") showTimes(isChanged);
}

function listen() {
  const buttons = {
    "t-in": () => moving.zoom(0.6),
    "t-out": () => moving.zoom(1.6),
    "t-prev": () => moving.showSteps(moving.stepInView() - 1, 1),
    "t-next": () => moving.showSteps(moving.stepInView() + 1, 1),
    "t-all": () => moving.show(0, Infinity),
    "t-slow": () => moving.showSlowest(),
    "t-recorded": () => showTimes(false),
    "t-changed": () => showTimes(true),
    "t-path": () => {
      timeline.showsPath = !timeline.showsPath;
      $("t-path").setAttribute("aria-pressed", String(timeline.showsPath));
      moving.redraw();
    },
  };
  for (const [id, act] of Object.entries(buttons)) $(id).addEventListener("click", act);
  new ResizeObserver(() => moving.redraw()).observe($("timeline"));
}

async function main() {
  const began = performance.now();
  const prefers = matchMedia("(prefers-color-scheme: dark)");
  let isDark = prefers.matches;
  setTheme(isDark);
  for (const root of document.querySelectorAll(".curves")) new Curves(root).draw();
  $("theme").addEventListener("click", () => setTheme((isDark = !isDark)));
  prefers.addEventListener("change", () => setTheme((isDark = prefers.matches)));
  addEventListener("beforeprint", () => setTheme(false));
  addEventListener("afterprint", () => setTheme(isDark));
  for (const one of document.querySelectorAll("[data-pick]")) {
    one.addEventListener("click", () => select(Number(one.dataset.pick)));
  }
  namePanels();
  if ($("timeline")) {
    timeline = new Timeline($("timeline"));
    moving = new Moving(timeline, new Overview($("overview"), timeline));
    timeline.ink = readInk();
    whatIf = new WhatIf(answered);
    listen();
    const first = document.querySelector("script[id^=data-]").id.slice(5);
    await select(Number(first));
  }
  document.documentElement.dataset.ready = (performance.now() - began).toFixed(0);
}

main();
