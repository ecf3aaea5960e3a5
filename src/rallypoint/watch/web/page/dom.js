// Elements. Text is always set as text: nothing that comes from a store is ever read as HTML.

import { visible } from "./text.js";

const LONGEST_TEXT = 20000;

export const byId = (id) => document.getElementById(id);

/** A copy of what is in a template of the page. */
export const clone = (id) => byId(id).content.firstElementChild.cloneNode(true);

/** The part of a copy that has a name. */
export const part = (element, name) => element.querySelector(`[data-part="${name}"]`);

const SVG = "http://www.w3.org/2000/svg";

/** An element of a drawing, with attributes and children; strings become text. */
export function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/**
 * Set a text. It may come from any client of the store: control characters are made visible, and a long text
 * is cut. It is set only if it is another one: a screen reader announces every change.
 */
export function setText(element, text) {
  const safe = visible(text.length > LONGEST_TEXT ? `${text.slice(0, LONGEST_TEXT)} …` : text);
  if (element.textContent !== safe) element.textContent = safe;
}

/** Show an element or not. */
export function show(element, wanted) {
  if (element.hidden === wanted) element.hidden = !wanted;
}

/** Children of a list, known again by their keys: those that stay keep their focus and their selection. */
export function syncList(list, entries, create, update) {
  const before = new Map([...list.children].map((child) => [child.dataset.key, child]));
  let place = list.firstElementChild;
  for (const [key, value] of entries) {
    let child = before.get(key);
    before.delete(key);
    if (!child) {
      child = create(key);
      child.dataset.key = key;
    }
    update(child, value, key);
    if (child === place) place = place.nextElementSibling;
    else list.insertBefore(child, place);
  }
  for (const child of before.values()) child.remove();
}

/** The children of a list are these texts, a line each. */
export function showLines(list, texts) {
  const entries = texts.map((text, place) => [String(place), text]);
  syncList(list, entries, () => document.createElement("li"), setText);
}

/** The answer to a question to the server, and whether it is one; null if the page has lost its server. */
export async function ask(path) {
  try {
    const response = await fetch(path);
    return { isAnswer: response.ok, told: await response.json() };
  } catch {
    return null; // the page says so elsewhere
  }
}

const ages = new Set();

let now = 0; // by the store's clock

/** Let an element say how long ago a moment is; `tick` counts on. */
export function showAge(element, moment, text) {
  ages.add(element);
  element.moment = moment;
  element.ageText = text;
  setText(element, text(Math.max(now - moment, 0)));
}

/** Let all of them say how long ago it is, now that it is this time. */
export function tick(time) {
  now = time;
  for (const element of ages) {
    if (!element.isConnected) ages.delete(element);
    else setText(element, element.ageText(Math.max(now - element.moment, 0)));
  }
}
