// Drawing the map of ranks: cells, the names of machines, the one that is selected.

import { MISSING, NUMBERS_FROM, paintCell, readColours } from "./cells.js";
import { rowAt } from "./layout.js";
import { visible } from "./text.js";

export const PADDING = 14;
const DENSE_BELOW = 11;
const HALO = 4;
const FONT = 'ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';

export class Painter {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.recolour();
  }

  /** The style sheet may have other colours now. */
  recolour() {
    this.colours = readColours();
  }

  /** Draw what is seen of a layout: so much of it, from a height on. */
  draw(layout, selected, { width, height, top }) {
    const { context } = this;
    this.resize(width, height);
    context.clearRect(0, 0, width, height);
    context.translate(PADDING, PADDING - top);
    const from = top - PADDING;
    this.drawCells(layout, from, from + height);
    this.drawNames(layout, from, from + height);
    if (selected) this.drawSelection(layout.size, selected);
  }

  /** A canvas with as many pixels as the screen has for it. */
  resize(width, height) {
    const scale = window.devicePixelRatio || 1;
    const [across, down] = [Math.round(width * scale), Math.round(height * scale)];
    if (this.canvas.width !== across || this.canvas.height !== down) {
      Object.assign(this.canvas, { width: across, height: down });
      Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    }
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
  }

  drawCells(layout, from, to) {
    const { context, colours } = this;
    const { size } = layout;
    const isDense = size < DENSE_BELOW;
    if (isDense) this.drawHalos(layout, from, to);
    context.font = `${Math.round(size * 0.4)}px ${FONT}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (const { rank, machine, at, x, y } of cellsBetween(layout, from, to)) {
      const letter = machine.states[at];
      context.globalAlpha = isDense && letter === "j" ? 0.5 : 1;
      paintCell(context, letter, x, y, size, colours);
      if (size >= NUMBERS_FROM && rank < 1e5) this.drawNumber(rank, letter, x, y, size);
    }
    context.globalAlpha = 1;
  }

  /** Among thousands, those that are missing have to be found at a glance. */
  drawHalos(layout, from, to) {
    const side = layout.size + 2 * HALO;
    this.context.fillStyle = this.colours.halo;
    for (const { machine, at, x, y } of cellsBetween(layout, from - HALO, to + HALO)) {
      if (MISSING.has(machine.states[at])) this.context.fillRect(x - HALO, y - HALO, side, side);
    }
  }

  drawNumber(rank, letter, x, y, size) {
    if (letter === "u") return;
    const { context, colours } = this;
    if (letter === "g") {
      // Before its cross, the number would be hard to read.
      const width = context.measureText(rank).width + 4;
      context.fillStyle = colours.sunken;
      context.fillRect(x + (size - width) / 2, y + size * 0.3, width, size * 0.4);
    }
    context.fillStyle = colours[letter]?.text ?? colours.text;
    context.fillText(rank, x + size / 2, y + size * (letter === "w" ? 0.72 : 0.5) + 0.5, size - 4);
  }

  drawNames(layout, from, to) {
    const { context, colours } = this;
    context.font = `12px ${FONT}`;
    for (const { machine, x, y, width, height } of layout.labels) {
      if (y + height < from || y > to) continue;
      const missing = machine.states.filter((letter) => MISSING.has(letter)).length;
      const count = layout.kind === "rows" ? `${machine.ranks.length - missing}/${machine.ranks.length}` : "";
      const room = width - (count ? context.measureText(count).width + 10 : 0);
      context.textAlign = "left";
      context.fillStyle = missing ? colours.bad : count ? colours.text : colours.muted;
      context.fillText(fit(context, nameOf(machine), room), x, y + height / 2);
      context.textAlign = "right";
      context.fillStyle = missing ? colours.bad : colours.muted;
      context.fillText(count, x + width, y + height / 2);
    }
  }

  drawSelection(size, { x, y }) {
    const { context, colours } = this;
    const away = size >= DENSE_BELOW ? 2 : 1.5;
    context.lineWidth = 2;
    for (const [edge, colour] of [[away - 1, colours.surface], [away, colours.focus]]) {
      context.strokeStyle = colour;
      context.strokeRect(x - edge, y - edge, size + 2 * edge, size + 2 * edge);
    }
  }
}

export const nameOf = (machine) => (machine.host ? visible(machine.host) : "machine not known");

function* cellsBetween(layout, from, to) {
  for (let row = rowAt(layout, from); row < layout.rows.length && layout.rows[row].y < to; row += 1) {
    for (const index of layout.rows[row].indexes) yield layout.cells[index];
  }
}

function fit(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let [low, high] = [0, text.length];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(`${text.slice(0, middle)}…`).width <= room) low = middle;
    else high = middle - 1;
  }
  return `${text.slice(0, low)}…`;
}
