// How a rank is drawn: each state has a colour and a shape of its own, so that either will do.

export const STATES = {
  j: "joined",
  w: "waiting",
  l: "late",
  g: "gone",
  u: "unseen",
};

/** Cells of this size have their rank in them. */
export const NUMBERS_FROM = 20;

export const MISSING = new Set(["l", "g"]);

/** The colours of the style sheet, as it is in force now. */
export function readColours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  const ofState = ([letter, name]) => [letter, { fill: read(name), text: read(`on-${name}`) }];
  return {
    ...Object.fromEntries(Object.entries(STATES).map(ofState)),
    focus: read("focus"),
    muted: read("muted"),
    text: read("text"),
    surface: read("surface"),
    sunken: read("sunken"),
    halo: read("bad-border"),
    bad: read("bad-text"),
  };
}

/** Draw the shape of a state into a square. */
export function paintCell(context, letter, x, y, size, colours) {
  const line = Math.max(1, Math.round(size / 9));
  const colour = (colours[letter] ?? colours.u).fill;
  context.fillStyle = colour;
  context.strokeStyle = colour;
  context.lineWidth = line;
  SHAPES[letter in SHAPES ? letter : "u"](context, x, y, size, line);
}

const SHAPES = {
  j: (context, x, y, size) => fillRounded(context, x, y, size, size),
  w: (context, x, y, size, line) => {
    // Half full: it waits for the rest.
    const top = Math.round(size * 0.45);
    fillRounded(context, x, y + top, size, size - top);
    context.strokeRect(x + line / 2, y + line / 2, size - line, size - line);
  },
  l: (context, x, y, size, line) => {
    const thick = size >= 8 ? line + 1 : line;
    context.lineWidth = thick;
    context.strokeRect(x + thick / 2, y + thick / 2, size - thick, size - thick);
  },
  g: (context, x, y, size, line) => {
    // Crossed out; where there is room for a number, it stands before the cross.
    const isLarge = size >= NUMBERS_FROM;
    const edge = isLarge ? line / 2 : size > 8 ? size * 0.14 : 0.5;
    context.lineWidth = isLarge ? line / 2 : line + 0.6;
    if (isLarge) context.strokeRect(x + edge, y + edge, size - 2 * edge, size - 2 * edge);
    context.beginPath();
    context.moveTo(x + edge, y + edge);
    context.lineTo(x + size - edge, y + size - edge);
    context.moveTo(x + size - edge, y + edge);
    context.lineTo(x + edge, y + size - edge);
    context.stroke();
  },
  u: (context, x, y, size) => {
    const side = Math.max(2, Math.round(size * 0.34));
    const edge = Math.round((size - side) / 2);
    context.fillRect(x + edge, y + edge, side, side);
  },
};

function fillRounded(context, x, y, width, height) {
  if (width < 9) {
    context.fillRect(x, y, width, height);
    return;
  }
  context.beginPath();
  context.roundRect(x, y, width, height, Math.min(4, width / 7));
  context.fill();
}

/** A small picture of a state, for keys and lists. */
export function paintGlyph(canvas, letter, colours) {
  const size = 12;
  const scale = window.devicePixelRatio || 1;
  canvas.width = canvas.height = size * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  paintCell(context, letter, 0, 0, size, colours);
}
