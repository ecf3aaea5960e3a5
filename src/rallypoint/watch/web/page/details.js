// All that is known of one rank.

import { STATES, paintGlyph, readColours } from "./cells.js";
import { ask, byId, clone, part, setText, show, showAge } from "./dom.js";
import { bytes, duration, number } from "./text.js";

const SOURCES = {
  hello: "it has said so itself",
  process: "the environment of its process",
  keys: "a key that only this rank writes",
  "": "not known",
};
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
  }

  show(told) {
    const letter = letterOf(told.state);
    setText(byId("details-title"), `Rank ${told.rank}`);
    setText(byId("details-state"), told.state);
    paintGlyph(byId("details-glyph"), letter, readColours());
    const list = byId("details-facts");
    const facts = factsOf(told);
    list.replaceChildren(...facts.map(([name, text, moment]) => factRow(name, text, moment)));
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
    ["Process", told.pid ? String(told.pid) : "not known"],
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
  if (told.state === "late") facts.push(["Expected by", "the plan of the job, or the ranks that have come"]);
  return facts;
}
