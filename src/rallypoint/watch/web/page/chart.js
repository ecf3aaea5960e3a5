// A line over the last minutes, drawn as SVG.

import { byId, makeSvg, setText } from "./dom.js";
import { duration, timeOfDay } from "./text.js";

const HEIGHT = 150;
const EDGE = { top: 12, right: 12, bottom: 22, left: 52 };
const LEAST_SECONDS = 60;

/** Ticks from 0 on, of which the last is not below the greatest value. */
export function ticksFor(greatest) {
  const rough = Math.max(greatest, 1e-9) / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough * 0.999);
  const count = Math.max(1, Math.ceil((greatest / step) * 0.999));
  return Array.from({ length: count + 1 }, (_, index) => index * step);
}

export class Chart {
  /** `format` writes a value; `summary` is the text beside the heading. */
  constructor(id, format) {
    this.frame = byId(id);
    this.summary = byId(`${id}-now`);
    this.format = format;
    this.points = [];
    this.svg = makeSvg("svg", { role: "img", height: HEIGHT });
    this.frame.append(this.svg);
    new ResizeObserver(() => this.draw()).observe(this.frame);
    this.frame.addEventListener("pointermove", (event) => this.point(event));
    this.frame.addEventListener("pointerleave", () => this.point(null));
  }

  /** Points are [time, value], the latest at the end; a value below 0 is none. */
  update(points, now) {
    this.points = points;
    this.now = now;
    this.draw();
  }

  draw() {
    const width = this.frame.clientWidth;
    if (!width || this.now === undefined) return;
    const values = this.points.map(([, value]) => value).filter((value) => value >= 0);
    const ticks = ticksFor(Math.max(...values, 0));
    const span = Math.max(LEAST_SECONDS, this.now - (this.points[0]?.[0] ?? this.now));
    this.scaleX = (time) => EDGE.left + (width - EDGE.left - EDGE.right) * (1 - (this.now - time) / span);
    const [floor, top] = [HEIGHT - EDGE.bottom, ticks.at(-1)];
    this.scaleY = (value) => floor - (floor - EDGE.top) * (value / top);
    this.marker = makeSvg("g", { class: "marker" });
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.setAttribute("aria-label", this.describe(values, span));
    this.svg.replaceChildren(...this.axes(ticks, span, width), ...this.lines(), this.marker);
    if (!this.isPointed) setText(this.summary, this.latest());
  }

  axes(ticks, span, width) {
    const lines = ticks.map((tick) => {
      const y = Math.round(this.scaleY(tick)) + 0.5;
      return makeSvg("line", { class: "grid-line", x1: EDGE.left, x2: width - EDGE.right, y1: y, y2: y });
    });
    const texts = ticks.map((tick) => label(EDGE.left - 8, this.scaleY(tick) + 4, "end", this.format(tick)));
    const bottom = HEIGHT - 4;
    const begin = label(EDGE.left, bottom, "start", `${duration(span)} ago`);
    return [...lines, ...texts, begin, label(width - EDGE.right, bottom, "end", "now")];
  }

  lines() {
    const paths = runsOf(this.points).flatMap((run) => {
      const points = run.map(([time, value]) => [this.scaleX(time), this.scaleY(value)].map(rounded));
      const [[first, height]] = points;
      const floor = HEIGHT - EDGE.bottom;
      const line = points.join("L");
      if (run.length === 1) return [makeSvg("circle", { class: "alone", cx: first, cy: height, r: 2 })];
      return [
        makeSvg("path", { class: "area", d: `M${first},${floor}L${line}L${points.at(-1)[0]},${floor}Z` }),
        makeSvg("path", { class: "line", d: `M${line}` }),
      ];
    });
    return paths;
  }

  latest() {
    const value = this.points.at(-1)?.[1] ?? -1;
    return value >= 0 ? this.format(value) : "–";
  }

  describe(values, span) {
    if (!values.length) return "no values yet";
    return `now ${this.latest()}, at most ${this.format(Math.max(...values))} in the last ${duration(span)}`;
  }

  point(event) {
    this.isPointed = event !== null;
    this.marker?.replaceChildren();
    if (!event || !this.points.length) {
      setText(this.summary, this.latest());
      return;
    }
    const x = event.clientX - this.frame.getBoundingClientRect().left;
    const away = ([time]) => Math.abs(this.scaleX(time) - x);
    const [time, value] = this.points.reduce((best, each) => (away(each) < away(best) ? each : best));
    if (value < 0) return;
    const at = this.scaleX(time);
    this.marker.append(
      makeSvg("line", { x1: at, x2: at, y1: EDGE.top, y2: HEIGHT - EDGE.bottom }),
      makeSvg("circle", { cx: at, cy: this.scaleY(value), r: 3.5 }),
    );
    setText(this.summary, `${this.format(value)} at ${timeOfDay(time)}`);
  }
}

const rounded = (value) => value.toFixed(1);

function label(x, y, anchor, text) {
  return makeSvg("text", { x, y, "text-anchor": anchor }, text);
}

/** Values that follow each other without a gap. */
function runsOf(points) {
  const runs = [];
  let run = [];
  for (const point of points) {
    if (point[1] >= 0) run.push(point);
    else if (run.length) {
      runs.push(run);
      run = [];
    }
  }
  return run.length ? [...runs, run] : runs;
}
