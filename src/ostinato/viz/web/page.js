// The page: a list with filters, one step with all its pictures, strips over the whole trajectory.
"use strict";

const ROW = 24;
const KEPT = 48;
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a97a6", "#5e4fa2", "#b2abd2", "#1b7837", "#a6761d", "#666666"];
const $ = (id) => document.getElementById(id);
const here = { reel: 0, step: 0, env: 0 };
// Where the last wish leads: keys pressed while a step is on its way count from there.
let target = { ...here };
let place = null;
let returns = [];
let chosen = [];
let strip = null;
let stripOf = "";
let wanted = null;
let busy = false;
const cache = new Map();

async function ask(what, given = {}) {
  const answer = await fetch(`api/${what}?${new URLSearchParams(given)}`);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

function momentAt(spot) {
  const key = `${spot.reel}/${spot.step}/${spot.env}`;
  let found = cache.get(key);
  if (found) cache.delete(key);
  else found = ask("moment", spot);
  cache.set(key, found);
  while (cache.size > KEPT) cache.delete(cache.keys().next().value);
  found.catch(() => cache.delete(key));
  return found;
}

// Only the latest wish is followed: scrubbing never queues up.
async function go(spot) {
  wanted = target = { ...target, ...spot };
  if (busy) return;
  busy = true;
  try {
    while (wanted) {
      const next = wanted;
      wanted = null;
      const seen = await momentAt(next);
      await show(seen);
    }
    target = { ...here };
    say("");
  } catch (error) {
    target = { ...here };
    say(String(error.message || error));
  } finally {
    busy = false;
  }
  const ahead = step(1, here);
  if (ahead) momentAt(ahead);
}

function say(text) {
  $("message").textContent = text;
}

function step(by, from) {
  const to = from.step + by;
  const steps = from.reel === shown.reel ? shown.steps : place.steps[from.reel];
  if (to >= 0 && to < steps) return { ...from, step: to };
  const reel = from.reel + by;
  if (reel < 0 || reel >= place.ids.length) return null;
  return { ...from, reel, step: by > 0 ? 0 : place.steps[reel] - 1 };
}

let shown = { steps: 1, envs: 1 };

async function show(seen) {
  const fresh = [...fill($("current"), seen.sides[0], seen), ...fill($("following"), seen.sides[1], seen)];
  await Promise.all(fresh.map((image) => image.decode().catch(() => {})));
  for (const change of pending.splice(0)) change();
  shown = seen;
  Object.assign(here, { reel: seen.reel, step: seen.step, env: seen.env });
  $("title").textContent = seen.title;
  $("facts").replaceChildren(...seen.facts.map(([word, value]) => {
    const pair = document.createElement("div");
    pair.append(text("dt", word), text("dd", value));
    return pair;
  }));
  $("scrub").max = seen.steps - 1;
  $("scrub").value = seen.step;
  if ($("env").length !== seen.envs)
    $("env").replaceChildren(...Array.from({ length: seen.envs }, (_, env) => new Option(env, env)));
  $("env").value = seen.env;
  document.body.dataset.shown = `${seen.reel}/${seen.step}/${seen.env}`;
  reveal();
  const key = `${seen.reel}/${seen.env}`;
  if (stripOf !== key) {
    stripOf = key;
    strip = null;
    ask("strip", { reel: seen.reel, env: seen.env }).then((found) => {
      if (stripOf !== key) return;
      strip = found;
      lines();
    }).catch((error) => say(error.message));
  }
  lines();
}

const pending = [];

// New pictures are decoded before they take the place of the old ones, so that nothing flickers.
function fill(section, side, seen) {
  const images = [];
  const views = side.pictures.map((picture) => {
    const figure = document.createElement("figure");
    const image = new Image();
    image.alt = `${side.title}, ${picture.camera}`;
    image.src = picture.source;
    images.push(image);
    figure.append(text("figcaption", picture.camera), image);
    return figure;
  });
  pending.push(() => {
    section.querySelector("h3").textContent = side.title;
    const area = section.querySelector(".views");
    const note = seen.problem || side.note;
    if (views.length) area.replaceChildren(...views);
    else if (note) {
      const box = text("p", note);
      box.className = seen.problem ? "note problem" : "note";
      area.replaceChildren(box);
    } else if (!area.querySelector("canvas")) area.replaceChildren(document.createElement("canvas"));
  });
  return images;
}

function text(tag, words) {
  const element = document.createElement(tag);
  element.textContent = words;
  return element;
}

function lines() {
  draw($("reward"), strip && strip.reward ? [strip.reward] : [], strip ? strip.ends : []);
  draw($("action"), strip && strip.action ? strip.action.lines : [], []);
  ["current", "following"].forEach((name, number) => {
    const canvas = $(name).querySelector(".views canvas");
    if (canvas) draw(canvas, strip ? strip.sides[number].flatMap((traces) => traces.lines) : [], []);
  });
}

function draw(canvas, series, ends) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const numbers = series.flat().filter((value) => value !== null);
  const low = numbers.reduce((a, b) => Math.min(a, b), 0), high = numbers.reduce((a, b) => Math.max(a, b), low + 1e-9);
  const x = (at) => 44 + (width - 52) * (at + 0.5) / shown.steps;
  const y = (value) => height - 8 - (height - 16) * (value - low) / (high - low);
  pen.font = "11px system-ui, sans-serif";
  pen.fillStyle = "#52606d";
  pen.textAlign = "right";
  if (numbers.length) for (const value of [low, high]) pen.fillText(Number(value.toPrecision(3)), 38, y(value) + 4);
  pen.strokeStyle = "#d55e00";
  for (const end of ends) stroke(pen, [[x(end), 4], [x(end), height - 4]], 1.5);
  series.forEach((values, number) => {
    pen.strokeStyle = COLOURS[number % COLOURS.length];
    stroke(pen, values.map((value, at) => (value === null ? null : [x(at), y(value)])), 1.4);
  });
  pen.strokeStyle = "#1f2933";
  pen.setLineDash([4, 3]);
  stroke(pen, [[x(here.step), 0], [x(here.step), height]], 1);
}

function stroke(pen, points, width) {
  pen.lineWidth = width;
  pen.beginPath();
  let up = true;
  for (const point of points) {
    if (point === null) up = true;
    else if (up) { pen.moveTo(...point); up = false; }
    else pen.lineTo(...point);
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
  for (let reel = 0; reel < place.ids.length; reel++) {
    const value = returns[reel];
    if (byReturn && !(typeof value === "number" && value >= low && value <= high)) continue;
    if (place.steps[reel] >= least && place.steps[reel] <= most) chosen.push(reel);
  }
  const read = returns.length < place.ids.length ? `, returns of ${returns.length.toLocaleString("en")} read` : "";
  $("count").textContent = `${chosen.length.toLocaleString("en")} of ${place.ids.length.toLocaleString("en")}${read}`;
  $("filler").style.height = `${chosen.length * ROW}px`;
  rows();
}

// Only the rows in sight exist.
function rows() {
  const list = $("list");
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 5);
  const last = Math.min(chosen.length, first + Math.ceil(list.clientHeight / ROW) + 10);
  $("rows").style.transform = `translateY(${first * ROW}px)`;
  $("rows").replaceChildren(...chosen.slice(first, last).map((reel) => {
    const row = document.createElement("div");
    const value = returns[reel];
    const words = [place.ids[reel], place.steps[reel], place.envs[reel], typeof value === "number" ? Number(value.toPrecision(5)) : value === null ? "broken" : ""];
    row.className = reel === here.reel ? "row here" : "row";
    row.dataset.reel = reel;
    row.append(...words.map((word) => text("span", word)));
    return row;
  }));
}

function reveal() {
  const at = chosen.indexOf(here.reel);
  const list = $("list");
  if (at >= 0 && (at * ROW < list.scrollTop || (at + 1) * ROW > list.scrollTop + list.clientHeight))
    list.scrollTop = at * ROW - list.clientHeight / 2;
  rows();
}

async function readReturns() {
  while (returns.length < place.ids.length) {
    const found = await ask("returns", { first: returns.length });
    returns = returns.concat(found.values);
    filter();
    await new Promise((done) => setTimeout(done, found.values.length ? 300 : 1000));
  }
}

function near(by) {
  const reel = target.reel + by;
  if (reel >= 0 && reel < place.ids.length) go({ reel, step: 0 });
}

const KEYS = {
  ArrowRight: () => { const to = step(1, target); if (to) go(to); },
  ArrowLeft: () => { const to = step(-1, target); if (to) go(to); },
  ArrowUp: () => near(1),
  ArrowDown: () => near(-1),
  b: () => go({ env: Math.min(target.env + 1, place.envs[target.reel] - 1) }),
  v: () => go({ env: Math.max(target.env - 1, 0) }),
  Home: () => go({ step: 0 }),
  End: () => go({ step: place.steps[target.reel] - 1 }),
};
KEYS.n = KEYS.ArrowRight;
KEYS.p = KEYS.ArrowLeft;

function listen() {
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("form, select") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (KEYS[event.key]) {
      event.preventDefault();
      KEYS[event.key]();
    }
  });
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("filters").addEventListener("input", (event) => { if (event.target.id !== "jump") filter(); });
  $("jump").addEventListener("change", () => {
    if ($("jump").value === "") return;
    const reel = place.ids.indexOf(Number($("jump").value));
    if (reel >= 0) go({ reel, step: 0 });
    else say(`there is no ${place.unit} ${$("jump").value}`);
  });
  $("scrub").addEventListener("input", () => go({ step: Number($("scrub").value) }));
  $("env").addEventListener("change", () => go({ env: Number($("env").value) }));
  $("list").addEventListener("scroll", rows);
  $("rows").addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (row) go({ reel: Number(row.dataset.reel), step: 0 });
  });
  for (const name of ["reward", "action"]) {
    $(name).addEventListener("click", (event) => {
      const at = (event.offsetX - 44) / ($(name).clientWidth - 52) * shown.steps;
      go({ step: Math.max(0, Math.min(shown.steps - 1, Math.floor(at))) });
    });
  }
  window.addEventListener("resize", () => { lines(); rows(); });
}

async function begin() {
  place = await ask("place");
  document.title = $("place").textContent = place.title;
  const [reel, step, env] = place.start;
  target = { reel, step, env };
  listen();
  filter();
  await go(target);
  await readReturns();
}

begin().catch((error) => say(String(error.message || error)));
