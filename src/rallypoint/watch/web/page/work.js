// What the ranks do, as their launchers tell it: who is where, and who is slow.

import { byId, part, setText, show, showAge, showLines } from "./dom.js";
import { counted, duration, number, stepRate } from "./text.js";

const SLOW = 0.8; // of the median

const STRANGE = ["since", "silent", "ended"]; // what a rank has that does not go on

const inOrder = ([, one], [, other]) => one.get("place") - other.get("place");
const slowestFirst = ([one, { rate }], [other, { rate: otherRate }]) => rate - otherRate || one - other;

export class Work {
  /** `panels` shows lists, `grid` selects a rank. */
  constructor(panels, grid) {
    this.panels = panels;
    this.grid = grid;
  }

  update(picture) {
    this.showStall(picture.get("stall"), picture.get("idle"));
    this.showGroups(picture.get("work"));
    this.showSteps(picture.get("steps"));
  }

  showStall(text, idle) {
    const since = idle.get("since");
    show(byId("stall"), Boolean(text) || since !== undefined);
    showLasting(byId("stall-age"), since, "for");
    setText(byId("stall-text"), text || idle.get("why") || "");
  }

  showGroups(work) {
    show(byId("work"), work.get("count") > 0);
    const groups = [...work.get("groups").values()];
    // While all go on, each is seen somewhere else: that is nothing to be said.
    const isWaitedFor = groups.some((group) => group.get("main") && group.has("since"));
    const isOdd = (group) => !group.get("main") && (isWaitedFor || STRANGE.some((name) => group.has(name)));
    const update = (row, group) => this.showGroup(row, group, work.get("size"), isOdd(group));
    this.panels.list("work", work.get("groups"), inOrder, work.get("count"), update);
  }

  showGroup(row, group, size, isOdd) {
    const isMain = group.get("main");
    row.classList.toggle("odd", isOdd);
    const button = part(row, "who");
    setText(button, isMain ? mostText(group, size) : group.get("who"));
    button.onclick = () => this.grid.select(group.get("rank"));
    setText(part(row, "verb"), verbOf(group, isOdd));
    setText(part(row, "where"), group.get("where") || "a place that is not known yet");
    setText(part(row, "steps"), stepsText(group.get("steps")));
    showLasting(part(row, "age"), group.get("since"), "has not moved for");
    showLasting(part(row, "silent"), group.get("silent")?.get("since"), "has not answered for");
    setText(part(row, "system"), group.get("system"));
    showLines(part(row, "family"), group.get("family"));
  }

  showSteps(steps) {
    show(byId("steps"), steps.get("count") > 0);
    const median = steps.get("median");
    setText(byId("steps-median"), `the median of all: ${stepRate(median)}`);
    const ranks = new Map([...steps.get("ranks")].map(([rank, each]) => [rank, Object.fromEntries(each)]));
    const update = (row, each, rank) => this.showStep(row, each, rank, median);
    this.panels.list("steps", ranks, slowestFirst, steps.get("count"), update);
  }

  showStep(row, { rate, host, step, since }, rank, median) {
    const button = part(row, "rank");
    setText(button, `rank ${rank} on ${host}`);
    button.onclick = () => this.grid.select(Number(rank));
    setText(part(row, "rate"), stepRate(rate));
    this.showShare(row, rank, median > 0 ? rate / median : null);
    const at = `step ${number(step)}`;
    showAge(part(row, "step"), since ?? 0, (seconds) =>
      since === undefined ? at : `${at}, ${duration(seconds)} ago`,
    );
  }

  /** How fast a rank is beside the others; null if those make no steps either. */
  showShare(row, rank, share) {
    row.classList.toggle("bad", share !== null && share < SLOW);
    show(part(row, "beside"), share !== null);
    if (share === null) return;
    const bar = part(row, "bar");
    bar.setAttribute("aria-label", `steps of rank ${rank}, of the median`);
    bar.value = Math.min(share, 1);
    setText(part(row, "share"), `${number(Math.round(share * 100))} % of the median`);
  }
}

/** For how long something has lasted; nothing if it does not. */
function showLasting(element, since, words) {
  showAge(element, since ?? 0, (seconds) => (since === undefined ? "" : `${words} ${duration(seconds)}`));
}

function mostText(group, size) {
  const count = group.get("count");
  if (count === 1) return group.get("who");
  return count === size ? `all ${counted(count, "rank")}` : `${number(count)} of ${counted(size, "rank")}`;
}

function verbOf(group, isOdd) {
  const one = group.get("count") === 1;
  if (group.get("ended")) return `${one ? "has" : "have"} ended (${group.get("ended")}), last seen in`;
  if (group.get("waits")) return `${one ? "waits" : "wait"} for others in`;
  return `${one ? "is" : "are"}${isOdd ? " elsewhere," : ""} in`;
}

function stepsText([first, last]) {
  if (first === undefined) return "";
  return first === last ? `step ${number(first)}` : `steps ${number(first)} to ${number(last)}`;
}
