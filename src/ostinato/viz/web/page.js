// The page: a list with filters, one step with all its images, and timelines of the trajectory.
"use strict";

const ROW = 24;
const KEPT = 48;
const LEFT = 56, RIGHT = 8, TOP = 8, BOTTOM = 18;
const dark = matchMedia("(prefers-color-scheme: dark)");
const $ = (id) => document.getElementById(id);
const here = { trajectory: 0, step: 0, env: 0 };
// The position requested last: keys pressed while a step is loading are relative to it.
let target = { ...here };
let source = null;
let returns = [];
let chosen = [];
let timeline = null;
let timelineOf = "";
let requested = null;
let busy = false;
const cache = new Map();

async function ask(what, given = {}) {
  const answer = await fetch(`api/${what}?${new URLSearchParams(given)}`).catch(() => {
    throw new Error("no answer: is `ostinato view` still running?");
  });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

function frameAt(position) {
  const key = `${position.trajectory}/${position.step}/${position.env}`;
  let found = cache.get(key);
  if (found) cache.delete(key);
  else found = ask("frame", position);
  cache.set(key, found);
  while (cache.size > KEPT) cache.delete(cache.keys().next().value);
  found.catch(() => cache.delete(key));
  return found;
}

// Only the latest request is executed: scrubbing does not queue requests.
async function go(position) {
  requested = target = { ...target, ...position };
  say("");  // now, not at the end: what is said meanwhile stays
  if (busy) return;
  busy = true;
  try {
    while (requested) {
      const next = requested;
      requested = null;
      const seen = await frameAt(next);
      await show(seen);
    }
    target = { ...here };
  } catch (error) {
    target = { ...here };
    say(String(error.message || error));
  } finally {
    busy = false;
  }
  const ahead = step(1, here);
  if (ahead) frameAt(ahead);
}

function say(text) {
  $("message").textContent = text;
}

function step(by, from) {
  const to = from.step + by;
  const steps = from.trajectory === shown.trajectory ? shown.steps : source.steps[from.trajectory];
  if (to >= 0 && to < steps) return { ...from, step: to };
  const trajectory = neighbour(from.trajectory, by);
  return trajectory === null ? null : { ...from, trajectory, step: by > 0 ? 0 : source.steps[trajectory] - 1 };
}

// The next (by = 1) or previous (by = -1) trajectory in the filtered list; null at its ends.
function neighbour(trajectory, by) {
  let low = 0, high = chosen.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (chosen[middle] < trajectory + (by > 0 ? 1 : 0)) low = middle + 1;
    else high = middle;
  }
  const at = by > 0 ? low : low - 1;
  return at >= 0 && at < chosen.length ? chosen[at] : null;
}

let shown = { steps: 1, envs: 1 };
const pending = [];

async function show(seen) {
  const fresh = [...fill($("current"), seen.observations[0], seen), ...fill($("following"), seen.observations[1], seen)];
  await Promise.all(fresh.map((image) => image.decode().catch(() => {})));
  for (const change of pending.splice(0)) change();
  shown = seen;
  Object.assign(here, { trajectory: seen.trajectory, step: seen.step, env: seen.env });
  $("title").textContent = seen.title;
  $("facts").replaceChildren(...(seen.problem ? [] : seen.facts).map(([word, value]) => {
    const pair = document.createElement("div");
    pair.append(text("dt", word), text("dd", value));
    return pair;
  }));
  $("scrub").max = seen.steps - 1;
  $("scrub").value = seen.step;
  if ($("env").length !== seen.envs)
    $("env").replaceChildren(...Array.from({ length: seen.envs }, (_, env) => new Option(env, env)));
  $("env").value = seen.env;
  document.body.dataset.shown = `${seen.trajectory}/${seen.step}/${seen.env}`;
  reveal();
  const key = `${seen.trajectory}/${seen.env}`;
  if (timelineOf !== key) {
    timelineOf = key;
    timeline = null;
    ask("timeline", { trajectory: seen.trajectory, env: seen.env }).then((found) => {
      if (timelineOf !== key) return;
      timeline = found;
      lines();
    }).catch((error) => {
      timelineOf = "";
      say(error.message);
    });
  }
  lines();
}

// New images are decoded before they replace the old ones, which avoids flicker.
function fill(section, view, seen) {
  const images = [];
  const views = view.pictures.map((picture) => {
    const figure = document.createElement("figure");
    const image = new Image();
    image.alt = `${view.title}, ${picture.camera}`;
    image.src = picture.source;
    images.push(image);
    figure.append(text("figcaption", picture.camera), image);
    return figure;
  });
  pending.push(() => {
    section.querySelector("h3").textContent = view.title;
    const area = section.querySelector(".views");
    const names = JSON.stringify(view.vectors);
    if (area.dataset.vectors === names && view.vectors.length) return;
    area.dataset.vectors = names;
    area.style.setProperty("--count", view.vectors.length);
    area.style.setProperty("--across", views.length > 3 ? Math.ceil(Math.sqrt(views.length)) : Math.max(views.length, 1));
    if (view.note) {
      area.replaceChildren(Object.assign(text("p", view.note), { className: seen.problem ? "note problem" : "note" }));
    } else area.replaceChildren(...views, ...view.vectors.map(lined));
  });
  return images;
}

function lined(name) {
  const figure = document.createElement("figure");
  figure.className = "lines";
  const canvas = document.createElement("canvas");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${name} over the steps`);
  figure.append(text("figcaption", name), canvas);
  return figure;
}

function text(tag, words) {
  const element = document.createElement(tag);
  element.textContent = words;
  return element;
}

function lines() {
  const { reward = null, action = null, observations = [[], []] } = timeline || {};
  draw($("reward"), { ...(reward || { name: "reward", lines: [], components: 0 }), zero: true }, timeline ? timeline.ends : []);
  draw($("action"), action || { name: "action", lines: [], components: 0 }, []);
  ["current", "following"].forEach((name, number) => {
    $(name).querySelectorAll("figure.lines").forEach((figure, at) => {
      draw(figure, observations[number][at] || { name: figure.firstChild.textContent, lines: [], components: 0 }, []);
    });
  });
}

// The legend over the canvas: component numbers in the colours of their lines.
function caption(figure, traces, ends) {
  const words = [document.createTextNode(traces.name)];
  if (traces.components > 1) words.push(...traces.lines.map((_, number) => {
    const key = text("em", number);
    key.style.color = source.colours[number];
    return key;
  }));
  if (traces.components > traces.lines.length) words.push(text("span", `of ${traces.components}`));
  if (ends.length) words.push(Object.assign(text("em", "| done"), { className: "done" }));
  if (traces.lines.length && !traces.lines.flat().some((value) => value !== null)) words.push(text("span", "no finite number"));
  figure.querySelector("figcaption").replaceChildren(...words);
}

// A number in compact notation: 12.3M, -0.0846, 1.2e-7.
function brief(value) {
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e15)) return value.toExponential(1).replace("+", "");
  return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
}

// Steps with a tick label: evenly spaced integers.
function ticks(steps, most) {
  const rough = Math.max(1, (steps - 1) / most), power = 10 ** Math.floor(Math.log10(rough));
  const by = [1, 2, 5, 10].map((size) => size * power).find((size) => size >= rough);
  return Array.from({ length: Math.floor((steps - 1) / by) + 1 }, (_, number) => number * by);
}

function draw(figure, traces, ends) {
  caption(figure, traces, ends);
  figure.hidden = Boolean(timeline) && !traces.lines.length;
  const canvas = figure.querySelector("canvas"), { lines: series, at } = traces;
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d"), colours = getComputedStyle(document.body);
  const colour = (name) => colours.getPropertyValue(`--${name}`);
  pen.scale(ratio, ratio);
  const steps = shown.steps, floor = height - BOTTOM;
  let low = traces.zero ? 0 : Infinity, high = traces.zero ? 0 : -Infinity;
  for (const values of series) for (const value of values) if (value !== null) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  const known = low <= high, range = known && high > low ? high - low : 1;
  const x = (step) => LEFT + (width - LEFT - RIGHT) * (step + 0.5) / steps;
  const y = (value) => floor - (floor - TOP) * (high > low ? (value - low) / range : 0.5);
  pen.font = "11px system-ui, sans-serif";
  pen.fillStyle = colour("faint");
  pen.strokeStyle = colour("line");
  pen.textAlign = "center";
  for (const step of ticks(steps, Math.max(1, Math.floor((width - LEFT) / 80)))) {
    stroke(pen, [[x(step), TOP], [x(step), floor]], 1);
    pen.fillText(step.toLocaleString("en"), x(step), height - 5);
  }
  pen.textAlign = "right";
  if (known) for (const value of high > low ? [low, high] : [low]) pen.fillText(brief(value), LEFT - 6, y(value) + 4);
  pen.strokeStyle = colour("red");
  for (const end of ends) stroke(pen, [[x(end), TOP - 4], [x(end), floor]], 1.5);
  series.forEach((values, number) => {
    pen.strokeStyle = source.colours[number];
    stroke(pen, values.map((value, number) => (value === null ? null : [x(at[number]), y(value)])), 1.4);
  });
  pen.strokeStyle = colour("ink");
  pen.setLineDash([4, 3]);
  stroke(pen, [[x(here.step), 0], [x(here.step), floor]], 1);
}

function stroke(pen, points, width) {
  pen.lineWidth = points.length === 1 ? 6 : width;
  pen.lineCap = "round";
  pen.beginPath();
  let up = true;
  for (const point of points) {
    if (point === null) up = true;
    else if (up) {
      pen.moveTo(...point);
      pen.lineTo(point[0] + 0.01, point[1]);  // a single point is drawn as a dot
      up = false;
    } else pen.lineTo(...point);
  }
  pen.stroke();
}

function bound(id, otherwise) {
  const value = $(id).value;
  return value === "" ? otherwise : Number(value);
}

function filter() {
  const low = bound("return-low", -Infinity), high = bound("return-high", Infinity);
  const least = bound("length-low", 0), most = bound("length-high", Infinity);
  const byReturn = $("return-low").value !== "" || $("return-high").value !== "";
  chosen = [];
  for (let trajectory = 0; trajectory < source.ids.length; trajectory++) {
    const value = returns[trajectory];
    if (byReturn && !(typeof value === "number" && value >= low && value <= high)) continue;
    if (source.steps[trajectory] >= least && source.steps[trajectory] <= most) chosen.push(trajectory);
  }
  const read = returns.length < source.ids.length ? `, returns of ${returns.length.toLocaleString("en")} read` : "";
  $("count").textContent = `${chosen.length.toLocaleString("en")} of ${source.ids.length.toLocaleString("en")}${read}`;
  $("filler").style.height = `${chosen.length * ROW}px`;
  rows();
}

// Only visible rows are in the document.
function rows() {
  const list = $("list");
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 5);
  const last = Math.min(chosen.length, first + Math.ceil(list.clientHeight / ROW) + 10);
  $("rows").style.transform = `translateY(${first * ROW}px)`;
  $("rows").replaceChildren(...chosen.slice(first, last).map((trajectory) => {
    const row = document.createElement("div"), value = returns[trajectory];
    const words = [source.ids[trajectory], source.steps[trajectory].toLocaleString("en"), source.envs[trajectory], typeof value === "number" ? Number(value.toPrecision(5)) : value === null ? "–" : ""];
    row.className = trajectory === here.trajectory ? "row here" : "row";
    row.dataset.trajectory = trajectory;
    row.setAttribute("role", "option");
    row.setAttribute("aria-selected", trajectory === here.trajectory);
    row.append(...words.map((word) => text("span", word)));
    return row;
  }));
}

function reveal() {
  const at = chosen.indexOf(here.trajectory);
  const list = $("list");
  if (at >= 0 && (at * ROW < list.scrollTop || (at + 1) * ROW > list.scrollTop + list.clientHeight))
    list.scrollTop = at * ROW - list.clientHeight / 2;
  rows();
}

async function readReturns() {
  while (returns.length < source.ids.length) {
    const found = await ask("returns", { first: returns.length });
    returns = returns.concat(found.values);
    filter();
    await new Promise((done) => setTimeout(done, 100));  // other requests come between
  }
}

function near(by) {
  const trajectory = neighbour(target.trajectory, by);
  if (trajectory !== null) go({ trajectory, step: 0 });
}

function turn(by) {
  const to = step(by, target);
  if (to) go(to);
}

const KEYS = {
  ArrowRight: () => turn(1),
  ArrowLeft: () => turn(-1),
  ArrowUp: () => near(1),
  ArrowDown: () => near(-1),
  b: () => go({ env: Math.min(target.env + 1, source.envs[target.trajectory] - 1) }),
  v: () => go({ env: Math.max(target.env - 1, 0) }),
  Home: () => go({ step: 0 }),
  End: () => go({ step: source.steps[target.trajectory] - 1 }),
};
KEYS.n = KEYS.ArrowRight;
KEYS.p = KEYS.ArrowLeft;

function jump(id) {
  if (id === "") return;
  const trajectory = /^[0-9]+$/.test(id) ? source.ids.indexOf(Number(id)) : -1;
  if (trajectory >= 0) go({ trajectory, step: 0 });
  else say(`there is no ${source.unit} ${id}: ${source.span}`);
}

function listen() {
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") document.activeElement.blur();
    if (event.target.closest("form, select") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (KEYS[event.key]) {
      event.preventDefault();
      KEYS[event.key]();
    }
  });
  $("filters").addEventListener("submit", (event) => {
    event.preventDefault();
    if (document.activeElement === $("jump")) jump($("jump").value.trim());
  });
  $("filters").addEventListener("input", (event) => { if (event.target.id !== "jump") filter(); });
  $("scrub").addEventListener("input", () => go({ step: Number($("scrub").value) }));
  $("back").addEventListener("click", () => turn(-1));
  $("on").addEventListener("click", () => turn(1));
  $("env").addEventListener("change", () => {
    $("env").blur();  // so that the arrow keys change the step again
    go({ env: Number($("env").value) });
  });
  $("list").addEventListener("scroll", rows);
  $("rows").addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (row) go({ trajectory: Number(row.dataset.trajectory), step: 0 });
  });
  for (const name of ["reward", "action"]) {
    const canvas = $(name).querySelector("canvas");
    canvas.addEventListener("click", (event) => {
      const at = (event.offsetX - LEFT) / (canvas.clientWidth - LEFT - RIGHT) * shown.steps;
      go({ step: Math.max(0, Math.min(shown.steps - 1, Math.floor(at))) });
    });
  }
  window.addEventListener("resize", () => { lines(); rows(); });
  dark.addEventListener("change", lines);
}

async function begin() {
  source = await ask("source");
  document.title = $("source").textContent = source.title;
  $("history").textContent = source.history;
  const [trajectory, step, env] = source.start;
  target = { trajectory, step, env };
  listen();
  filter();
  await go(target);
  await readReturns();
}

begin().catch((error) => say(String(error.message || error)));
