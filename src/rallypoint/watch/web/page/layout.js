// Where each rank is drawn. Pure: numbers in, numbers out.

const SIZES = [38, 30, 24, 20, 16, 13, 11, 9, 7, 6, 5];
const ROWS_AT_MOST = 24;
const LABEL_ABOVE_FROM = 16;
const LABEL_HEIGHT = 17;

export const gapOf = (size) => (size >= 20 ? 4 : size >= 11 ? 3 : size >= 7 ? 2 : 1);

/**
 * Lay out machines in a width; the cells are the largest with which all of it is at most so high.
 *
 * A few machines get a row each, with their names in front. Many are tiles side by side, with their names
 * above while the cells are large enough. `zoom` makes the cells larger than fit, by this number of steps.
 */
export function layOut(machines, width, height, zoom = 0) {
  let step = SIZES.findIndex((size) => heightOf(machines, width, size) <= height);
  if (step < 0) step = SIZES.length - 1;
  const size = SIZES[Math.min(Math.max(step - zoom, 0), SIZES.length - 1)];
  return {
    ...arrange(machines, width, size),
    canGrow: step - zoom > 0,
    canShrink: step - zoom < SIZES.length - 1,
  };
}

const heightOf = (machines, width, size) => arrange(machines, width, size, true).height;

function arrange(machines, width, size, onlyMeasure = false) {
  const isRows = machines.length <= ROWS_AT_MOST;
  return isRows ? inRows(machines, width, size, onlyMeasure) : inTiles(machines, width, size, onlyMeasure);
}

function inRows(machines, width, size, onlyMeasure) {
  const pitch = size + gapOf(size);
  const isNarrow = width < 520;
  const label = isNarrow ? 0 : Math.min(190, Math.max(110, width * 0.2));
  const columns = Math.max(1, Math.floor((width - label + gapOf(size)) / pitch));
  const space = Math.max(8, Math.round(size * 0.4));
  const sketch = new Sketch("rows", size, onlyMeasure);
  let y = 2;
  for (const machine of machines) {
    const rows = Math.max(1, Math.ceil(machine.ranks.length / columns));
    const top = isNarrow ? y + LABEL_HEIGHT + 2 : y;
    const least = isNarrow ? 0 : 18;
    if (isNarrow) sketch.name(machine, 0, y, width, LABEL_HEIGHT);
    else sketch.name(machine, 0, y, label - 14, Math.max(size, least));
    const middle = rows === 1 ? Math.max(0, Math.round((least - size) / 2)) : 0;
    sketch.place(machine, label, top + middle, columns, pitch);
    y = top + Math.max(rows * pitch - gapOf(size), least) + space;
  }
  return sketch.finish(y - space + 2);
}

function inTiles(machines, width, size, onlyMeasure) {
  const pitch = size + gapOf(size);
  const most = machines.reduce((found, machine) => Math.max(found, machine.ranks.length), 1);
  const fitting = Math.max(1, Math.floor((width + gapOf(size)) / pitch));
  const columns = Math.min(fitting, most <= 8 ? most : most <= 128 ? 8 : fitting);
  const label = size >= LABEL_ABOVE_FROM ? LABEL_HEIGHT : 0;
  const between = Math.max(3, Math.round(size * 0.5));
  const tile = columns * pitch - gapOf(size) + between;
  const abreast = Math.max(1, Math.floor((width + between) / tile));
  const sketch = new Sketch("tiles", size, onlyMeasure);
  let y = 2;
  for (let first = 0; first < machines.length; first += abreast) {
    let deepest = 1;
    for (const [place, machine] of machines.slice(first, first + abreast).entries()) {
      const x = place * tile;
      if (label) sketch.name(machine, x, y, tile - between, label);
      sketch.place(machine, x, y + label, columns, pitch);
      deepest = Math.max(deepest, Math.ceil(machine.ranks.length / columns));
    }
    y += label + deepest * pitch - gapOf(size) + between;
  }
  return sketch.finish(y - between + 2);
}

/** Cells as they are placed, in the order of machines, and in rows of the same height for moving about. */
class Sketch {
  constructor(kind, size, onlyMeasure) {
    this.kind = kind;
    this.size = size;
    this.onlyMeasure = onlyMeasure;
    this.cells = []; // {rank, machine, at, x, y}
    this.labels = [];
  }

  name(machine, x, y, width, height) {
    if (!this.onlyMeasure) this.labels.push({ machine, x, y, width, height });
  }

  place(machine, left, top, columns, pitch) {
    if (this.onlyMeasure) return;
    machine.ranks.forEach((rank, at) => {
      const x = left + (at % columns) * pitch;
      const y = top + Math.floor(at / columns) * pitch;
      this.cells.push({ rank, machine, at, x, y });
    });
  }

  finish(height) {
    const { kind, size, cells, labels } = this;
    return { kind, size, cells, labels, height: Math.ceil(height), rows: rowsOf(cells) };
  }
}

function rowsOf(cells) {
  const byHeight = new Map();
  cells.forEach((cell, index) => {
    if (!byHeight.has(cell.y)) byHeight.set(cell.y, []);
    byHeight.get(cell.y).push(index);
  });
  return [...byHeight.entries()]
    .sort(([first], [second]) => first - second)
    .map(([y, indexes]) => ({ y, indexes: indexes.sort((one, other) => cells[one].x - cells[other].x) }));
}

/** The first row that ends below a height. */
export function rowAt(layout, y) {
  let low = 0;
  let high = layout.rows.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (layout.rows[middle].y + layout.size + gapOf(layout.size) <= y) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The cell at a point, the gap behind it included; -1: none. */
export function cellAt(layout, x, y) {
  const row = layout.rows[rowAt(layout, y)];
  if (!row || row.y > y) return -1;
  const found = nearest(layout, row, x - layout.size / 2);
  const cell = layout.cells[found];
  return cell && x >= cell.x && x < cell.x + layout.size + gapOf(layout.size) ? found : -1;
}

/** The cell that is `rows` rows further down (up, if negative), as straight as can be. */
export function moveRows(layout, index, rows) {
  const cell = layout.cells[index];
  const row = rowAt(layout, cell.y) + rows;
  const target = layout.rows[Math.min(Math.max(row, 0), layout.rows.length - 1)];
  return nearest(layout, target, cell.x);
}

function nearest(layout, row, x) {
  let low = 0;
  let high = row.indexes.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    const here = Math.abs(layout.cells[row.indexes[middle]].x - x);
    const next = Math.abs(layout.cells[row.indexes[middle + 1]].x - x);
    if (next < here || (next === here && layout.cells[row.indexes[middle]].x < x)) low = middle + 1;
    else high = middle;
  }
  return row.indexes[low];
}
