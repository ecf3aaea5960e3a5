// The map of all ranks, by machine: a canvas as large as what is seen of it, drawn anew as it is scrolled.

import { MISSING, STATES } from "./cells.js";
import { byId, setText, show } from "./dom.js";
import { cellAt, layOut, moveRows } from "./layout.js";
import { PADDING, Painter, nameOf } from "./painting.js";

const LEAST_HEIGHT = 260;
const MOST_HEIGHT = 700;
const PART_OF_WINDOW = 0.7;
const ROWS_OF_A_LEAP = 8;

/** `0-3,7` and `j3lw` as lists. */
export function decode(ranges, runs) {
  const ranks = [];
  for (const range of ranges.split(",")) {
    const [first, last = first] = range.split("-").map(Number);
    for (let rank = first; rank <= last; rank += 1) ranks.push(rank);
  }
  const states = [];
  for (const [, letter, count] of runs.matchAll(/([a-z])(\d*)/g)) {
    for (let left = Number(count || 1); left > 0; left -= 1) states.push(letter);
  }
  return { ranks, states };
}

const isMissing = (letter) => MISSING.has(letter);

/** By their first ranks; those whose machine is not known come last. */
const byFirstRank = (one, other) => !one.host - !other.host || one.ranks[0] - other.ranks[0];

export class Grid {
  /** `onSelect` hears of a rank that is chosen, or null. */
  constructor(onSelect) {
    this.onSelect = onSelect;
    this.frame = byId("grid");
    this.said = byId("grid-said");
    this.tip = byId("grid-tip");
    this.painter = new Painter(byId("grid-canvas"));
    this.machines = new Map();
    this.layout = layOut([], 1, 1);
    this.places = new Map(); // of a rank, its cell in the layout
    this.selected = null;
    this.zoom = 0;
    this.listenToMap();
    this.listenToTools();
  }

  listenToMap() {
    const { frame } = this;
    for (const event of ["scroll", "focus", "blur"]) frame.addEventListener(event, () => this.drawSoon());
    frame.addEventListener("keydown", (event) => this.onKey(event));
    frame.addEventListener("click", (event) => this.onClick(event));
    frame.addEventListener("pointermove", (event) => this.onHover(event));
    frame.addEventListener("pointerleave", () => show(this.tip, false));
    new ResizeObserver(() => this.arrange()).observe(frame);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.painter.recolour();
      this.drawSoon();
    });
  }

  listenToTools() {
    byId("zoom-in").addEventListener("click", () => this.setZoom(this.zoom + 1));
    byId("zoom-out").addEventListener("click", () => this.setZoom(this.zoom - 1));
    byId("zoom-fit").addEventListener("click", () => this.setZoom(0));
    byId("only-trouble").addEventListener("change", () => this.arrange());
    byId("next-missing").addEventListener("click", () => this.selectNextMissing());
    byId("go-to-rank").addEventListener("submit", (event) => {
      event.preventDefault();
      this.select(Number(byId("go-to-rank-number").value));
    });
  }

  // What there is

  /** Take over what machines there are now; what has not changed is not decoded again. */
  update(told) {
    const before = this.machines;
    let isSame = before.size === told.size;
    this.machines = new Map();
    for (const [host, each] of told) {
      const [ranges, runs] = [each.get("ranks"), each.get("states")];
      const known = before.get(host);
      isSame &&= known?.ranges === ranges;
      const isOld = known?.ranges === ranges && known.runs === runs;
      this.machines.set(host, isOld ? known : { host, ranges, runs, ...decode(ranges, runs) });
    }
    if (isSame && !byId("only-trouble").checked) this.takeStates();
    else this.arrange();
    if (this.selected !== null) this.say(this.selected);
  }

  /** Machines and ranks are as before: cells stay where they are, and only their states are others. */
  takeStates() {
    for (const place of [...this.layout.cells, ...this.layout.labels]) {
      place.machine = this.machines.get(place.machine.host);
    }
    this.byRank = null;
    this.drawSoon();
  }

  /** Machines with missing ranks, those that miss most first. */
  troubled() {
    return [...this.machines.values()]
      .map((machine) => ({ machine, missing: machine.states.filter(isMissing).length }))
      .filter(({ missing }) => missing)
      .sort((one, other) => other.missing - one.missing || byFirstRank(one.machine, other.machine));
  }

  /** The machine of a rank, and its state; undefined if there is no rank of this number. */
  find(rank) {
    if (!this.byRank) {
      this.byRank = new Map();
      for (const machine of this.machines.values()) {
        machine.ranks.forEach((each, at) => this.byRank.set(each, { machine, at }));
      }
    }
    const found = this.byRank.get(rank);
    return found && { machine: found.machine, letter: found.machine.states[found.at] };
  }

  describe(rank, { machine, letter }) {
    return `rank ${rank}, ${nameOf(machine)}, ${STATES[letter] ?? letter}`;
  }

  // How it is shown

  arrange() {
    this.byRank = null;
    const width = this.frame.clientWidth - 2 * PADDING;
    if (width <= 0) return;
    const all = [...this.machines.values()].sort(byFirstRank);
    const shown = byId("only-trouble").checked ? all.filter(({ states }) => states.some(isMissing)) : all;
    const most = Math.max(LEAST_HEIGHT, Math.min(window.innerHeight * PART_OF_WINDOW, MOST_HEIGHT));
    this.layout = layOut(shown, width, most - 2 * PADDING, this.zoom);
    this.places = new Map(this.layout.cells.map((cell, index) => [cell.rank, index]));
    byId("grid-spacer").style.height = `${this.layout.height}px`;
    this.frame.style.height = `${Math.min(this.layout.height + 2 * PADDING, Math.ceil(most))}px`;
    byId("zoom-in").disabled = !this.layout.canGrow;
    byId("zoom-out").disabled = !this.layout.canShrink;
    byId("zoom-fit").disabled = this.zoom === 0;
    this.draw();
  }

  setZoom(zoom) {
    this.zoom = zoom;
    this.arrange();
    this.reveal();
  }

  drawSoon() {
    this.pending ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    if (this.pending) cancelAnimationFrame(this.pending);
    this.pending = null;
    const { clientWidth: width, clientHeight: height, scrollTop: top } = this.frame;
    this.painter.draw(this.layout, this.selectedCell(), { width, height, top });
  }

  // Which one is selected

  selectedCell() {
    return this.layout.cells[this.places.get(this.selected)];
  }

  select(rank) {
    if (rank !== null && !this.find(rank)) {
      setText(this.said, `there is no rank ${rank}`);
      return;
    }
    this.selected = rank;
    this.say(rank);
    this.reveal();
    this.drawSoon();
    this.onSelect(rank);
  }

  selectNextMissing() {
    const missing = this.troubled()
      .flatMap(({ machine: { ranks, states } }) => ranks.filter((_, at) => isMissing(states[at])))
      .sort((one, other) => one - other);
    if (missing.length) this.select(missing.find((rank) => rank > (this.selected ?? -1)) ?? missing[0]);
  }

  /** For screen readers. */
  say(rank) {
    const found = this.find(rank);
    setText(this.said, found ? this.describe(rank, found) : "");
  }

  reveal() {
    const cell = this.selectedCell();
    if (!cell) return;
    const top = cell.y + PADDING - 20;
    const bottom = cell.y + PADDING + this.layout.size + 20;
    const { scrollTop, clientHeight } = this.frame;
    if (top < scrollTop) this.frame.scrollTop = top;
    else if (bottom > scrollTop + clientHeight) this.frame.scrollTop = bottom - clientHeight;
  }

  onKey(event) {
    if (!this.layout.cells.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const target = this.moves()[event.key];
    if (target) this.select(this.layout.cells[target()].rank);
    else if (event.key === "m") this.selectNextMissing();
    else if (event.key === "Escape") this.select(null);
    else return;
    event.preventDefault();
  }

  /** Of each key, the cell that it leads to. */
  moves() {
    const last = this.layout.cells.length - 1;
    const here = this.places.get(this.selected);
    const along = (steps) => () => (here === undefined ? 0 : Math.min(Math.max(here + steps, 0), last));
    const across = (rows) => () => (here === undefined ? 0 : moveRows(this.layout, here, rows));
    return {
      ArrowRight: along(1),
      ArrowLeft: along(-1),
      ArrowDown: across(1),
      ArrowUp: across(-1),
      PageDown: across(ROWS_OF_A_LEAP),
      PageUp: across(-ROWS_OF_A_LEAP),
      Home: () => 0,
      End: () => last,
    };
  }

  // The mouse

  cellAt(event) {
    const box = this.frame.getBoundingClientRect();
    const x = event.clientX - box.left - this.frame.clientLeft - PADDING;
    const y = event.clientY - box.top - this.frame.clientTop - PADDING + this.frame.scrollTop;
    return this.layout.cells[cellAt(this.layout, x, y)];
  }

  onClick(event) {
    const cell = this.cellAt(event);
    if (cell) this.select(cell.rank);
  }

  onHover(event) {
    const cell = this.cellAt(event);
    show(this.tip, Boolean(cell));
    if (!cell) return;
    setText(this.tip, this.describe(cell.rank, this.find(cell.rank)));
    const box = this.frame.getBoundingClientRect();
    const most = box.width - this.tip.offsetWidth - 4;
    this.tip.style.left = `${Math.max(Math.min(event.clientX - box.left + 14, most), 4)}px`;
    this.tip.style.top = `${event.clientY - box.top + 18}px`;
  }
}
