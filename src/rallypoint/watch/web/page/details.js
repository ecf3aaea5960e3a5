// All that is known of one rank.

import { STATES, paintGlyph, readColours } from "./cells.js";
import { ask, byId, clone, part, setText, show, showAge, syncList } from "./dom.js";
import { bytes, counted, duration, number, stepRate } from "./text.js";

const SOURCES = {
  hello: "it has said so itself",
  process: "the environment of its process",
  keys: "a key that only this rank writes",
  "": "not known",
};
const MAIN = "Main thread";
const letterOf = (state) => Object.keys(STATES).find((letter) => STATES[letter] === state);

export class Details {
  constructor() {
    this.panel = byId("details");
    this.rank = null;
  }

  /** Show a rank, or none. */
  async open(rank) {
    this.rank = rank;
    show(this.panel, rank !== null);
    byId("details-stacks").replaceChildren(); // another rank's: what was opened there is closed
    if (rank !== null) await this.refresh();
  }

  /** Ask for it again: it may have changed. */
  async refresh() {
    const rank = this.rank;
    if (rank === null) return;
    const answer = await ask(`api/ranks/${rank}`);
    if (!answer || rank !== this.rank) return;
    if (answer.isAnswer) this.show(answer.told);
    else this.fail(answer.told.message);
  }

  fail(message) {
    setText(byId("details-title"), `Rank ${this.rank}`);
    setText(byId("details-state"), message);
    byId("details-facts").replaceChildren();
    byId("details-stacks").replaceChildren();
  }

  show(told) {
    const letter = letterOf(told.state);
    setText(byId("details-title"), `Rank ${told.rank}`);
    setText(byId("details-state"), told.state);
    paintGlyph(byId("details-glyph"), letter, readColours());
    const list = byId("details-facts");
    const facts = factsOf(told);
    list.replaceChildren(...facts.map(([name, text, moment]) => factRow(name, text, moment)));
    syncList(byId("details-stacks"), stacksOf(told.doing), newStack, showStack);
  }
}

function factRow(name, text, moment) {
  const row = clone("fact-row");
  setText(part(row, "name"), name);
  if (moment === undefined) setText(part(row, "value"), text);
  else showAge(part(row, "value"), moment, (seconds) => text.replace("%", duration(seconds)));
  return row;
}

/** Names and texts; in those with a moment, % stands for how long ago that is. */
function factsOf(told) {
  const isHere = told.state === "joined" || told.state === "waiting";
  const facts = [
    ["Machine", told.host || "not known"],
    ["Process", String(told.pid || told.doing?.pid || "not known")],
  ];
  if (told.local_rank >= 0) facts.push(["Local rank", String(told.local_rank)]);
  if (told.since !== undefined) {
    facts.push(isHere ? ["Connected", "for %", told.since] : ["Left", "% ago", told.since]);
  }
  if (told.why) facts.push(["Why", told.why]);
  if (told.wait_since !== undefined) facts.push(["Waits", "for %", told.wait_since]);
  if (told.waits.length) facts.push(["Waits for", told.waits.join("\n")]);
  if (isHere) {
    facts.push(["Operations", number(told.operations)]);
    facts.push(["Received", bytes(told.received)], ["Sent", bytes(told.sent)]);
  }
  if (isHere || told.source) facts.push(["Known by", SOURCES[told.source] ?? told.source]);
  if (told.doing) facts.push(...doingFacts(told.doing));
  if (told.state === "late") facts.push(["Expected by", "the plan of the job, or the ranks that have come"]);
  return facts;
}

/** What its launcher has told of it. */
function doingFacts(doing) {
  const facts = [["Does", doing.where || "it has not told its stack yet"]];
  if (doing.ended) facts.push(["Ended", doing.ended]);
  if (doing.still_since !== undefined) facts.push(["Not moved", "for %", doing.still_since]);
  if (doing.silent_since !== undefined) facts.push(["No answer", "for %", doing.silent_since]);
  const rate = doing.rate >= 0 ? `, ${stepRate(doing.rate)}` : "";
  if (doing.step >= 0) facts.push(["Step", number(doing.step) + rate]);
  if (doing.step_since !== undefined) facts.push(["Last step", "% ago", doing.step_since]);
  if (doing.state) facts.push(["State", doing.state]);
  if (doing.call) facts.push(["System call", doing.call]);
  if (doing.cores >= 0) facts.push(["Processor", `${number(Math.round(doing.cores * 100))} % of a core`]);
  const swapped = doing.swapped > 0 ? `, ${bytes(doing.swapped)} swapped out` : "";
  if (doing.memory > 0) facts.push(["Memory", bytes(doing.memory) + swapped]);
  if (doing.gpu) facts.push(["GPU", doing.gpu]);
  facts.push(["Looked at", "% ago", doing.told_since]);
  return facts;
}

/** The stacks of a rank by name: its main thread's, its other threads', and its processes'. */
function stacksOf(doing) {
  if (!doing) return [];
  const main = doing.stack.length ? [[MAIN, { ...doing, state: "", call: "" }]] : [];
  const threads = doing.threads.map((each, at) => [`Thread ${at + 2}`, each]);
  const more = doing.more_threads;
  if (more) threads.push([`and ${counted(more, "more thread")}`, { where: "", stack: [] }]);
  const children = doing.children.map((each) => [`Process ${each.pid}`, each]);
  return [...main, ...threads, ...children];
}

function newStack(name) {
  const row = clone("stack-row");
  row.querySelector("details").open = name === MAIN;
  return row;
}

function showStack(row, each, name) {
  setText(part(row, "name"), name);
  setText(part(row, "where"), each.where);
  setText(part(row, "facts"), [each.state, each.call].filter(Boolean).join(", "));
  const frames = each.stack.map((frame, at) => [String(at), frame]);
  syncList(part(row, "frames"), frames, () => clone("frame-row"), (line, frame) => {
    setText(part(line, "function"), frame.function);
    setText(part(line, "at"), frame.at);
    line.classList.toggle("own", frame.own);
    show(part(line, "mark"), frame.own);
  });
}
