// The page: takes pictures of the store as they come, and shows them.

import { paintGlyph, readColours } from "./cells.js";
import { Chart } from "./chart.js";
import { Details } from "./details.js";
import { byId, setText, show, showAge, tick } from "./dom.js";
import { Grid } from "./grid.js";
import { Keys } from "./keys.js";
import { Panels } from "./panels.js";
import { Stream } from "./stream.js";
import { Summary } from "./summary.js";
import { counted, duration, latency, number, timeOfDay } from "./text.js";
import { Work } from "./work.js";

const SLOW_SECONDS = 2; // if the store is asked less often, the page says how often

const details = new Details();
const grid = new Grid((rank) => details.open(rank));
const summary = new Summary(grid);
const panels = new Panels(grid);
const work = new Work(panels, grid);
const keys = new Keys();
const rate = new Chart("chart-rate", (value) => number(Number(value.toPrecision(3))));
const slowness = new Chart("chart-p99", latency);

let ahead = 0; // what the store's clock is ahead of this one's, in seconds
let latest = 0; // when the last picture came
const now = () => Date.now() / 1000 + ahead;

const stream = new Stream(showPicture, showLost);
byId("try-now").addEventListener("click", () => stream.tryNow());
byId("details-close").addEventListener("click", () => grid.select(null));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paintGlyphs);
paintGlyphs();
// What is over is not counted on.
setInterval(() => document.body.classList.contains("stale") || tick(now()), 1000);

function showPicture(picture) {
  const problem = picture.get("problem");
  latest = Date.now() / 1000;
  setText(byId("address"), picture.get("address"));
  document.body.classList.toggle("waiting", !picture.has("time"));
  if (picture.has("time") && !problem) {
    ahead = picture.get("time") - latest;
    tick(now());
  }
  if (picture.has("time")) showStore(picture);
  if (problem) showProblem(problem, picture);
  else showHealth(picture.get("every"));
}

function showStore(picture) {
  const store = picture.get("store");
  grid.update(picture.get("machines"));
  summary.update(picture);
  panels.update(picture);
  work.update(picture);
  showCharts(picture);
  keys.update(store.get("keys") + store.get("queues"), picture.get("every"));
  details.refresh();
  const [kind, version, backend, pid] = ["kind", "version", "backend", "pid"].map((name) => store.get(name));
  const workers = store.get("workers") ? ` and ${counted(store.get("workers"), "worker")}` : "";
  setText(byId("about"), `${kind} ${version} (${backend}), process ${pid}${workers} on ${store.get("host")}`);
  showAge(byId("uptime"), store.get("since"), (seconds) => `up for ${duration(seconds)}`);
}

function showCharts(picture) {
  const seconds = [...picture.get("history")].map(([time, values]) => [Number(time), values]);
  seconds.sort(([one], [other]) => one - other);
  rate.update(seconds.map(([time, [operations]]) => [time, operations]), picture.get("time"));
  slowness.update(seconds.map(([time, [, p99]]) => [time, p99]), picture.get("time"));
}

// Whether all is well with the store, and with the way to it

function showHealth(every) {
  setLive("live", every > SLOW_SECONDS ? `live, every ${duration(every)}` : "live");
  setBanner(null);
}

function showProblem(problem, picture) {
  const before = picture.has("time") ? " What is shown was so before." : "";
  setLive("lost", "no news");
  setBanner({
    title: `No news from the store at ${picture.get("address")}`,
    text: [problem.get("message"), problem.get("hint")].filter(Boolean).join("\n"),
    foot: `It is asked again and again.${before}`,
  });
}

function showLost(reason, pause) {
  const age = latest ? ` What is shown is from ${timeOfDay(latest)}.` : "";
  setLive("lost", "no connection");
  setBanner({
    title: "This page has lost its server",
    text: reason,
    foot: `The next try is in ${duration(pause)}.${age}`,
    canTry: true,
  });
}

function setLive(state, text) {
  byId("live").dataset.state = state;
  setText(byId("live-text"), text);
}

function setBanner(content) {
  show(byId("banner"), content !== null);
  document.body.classList.toggle("stale", content !== null);
  if (!content) return;
  setText(byId("banner-title"), content.title);
  setText(byId("banner-text"), content.text);
  setText(byId("banner-foot"), content.foot);
  show(byId("try-now"), Boolean(content.canTry));
}

function paintGlyphs() {
  const colours = readColours();
  for (const canvas of document.querySelectorAll("canvas[data-state]")) {
    paintGlyph(canvas, canvas.dataset.state, colours);
  }
}
