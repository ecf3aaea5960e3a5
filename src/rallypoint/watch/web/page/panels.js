// The lists beside the map: waits, barriers, rounds, relays, errors, operations.

import { STATES } from "./cells.js";
import { byId, clone, part, setText, show, showAge, showLines, syncList } from "./dom.js";
import { bytes, counted, duration, latency, number, ranks, timeOfDay, visible, waiting } from "./text.js";

const sinceOf = ([, each]) => each.get("since") ?? Infinity;
const longestFirst = (one, other) => sinceOf(one) - sinceOf(other);
const latestFirst = (one, other) => sinceOf(other) - sinceOf(one);
const lostFirst = ([, one], [, other]) => one.get("present") - other.get("present");
const mostFirst = ([, one], [, other]) => other.get("count") - one.get("count");
const asTold = () => 0;

export class Panels {
  /** `grid` finds the machine and the state of a rank, and selects it. */
  constructor(grid) {
    this.grid = grid;
  }

  update(picture) {
    const counts = picture.get("counts");
    const store = picture.get("store");
    const showWait = (...row) => this.showWait(...row);
    this.list("waits", picture.get("waits"), longestFirst, counts.get("waits"), showWait);
    this.list("barriers", picture.get("barriers"), longestFirst, counts.get("barriers"), showBarrier);
    this.list("rounds", picture.get("meetings"), asTold, counts.get("meetings"), showMeeting);
    this.list("relays", picture.get("relays"), lostFirst, store.get("relays"), showRelay);
    this.list("errors", picture.get("errors"), latestFirst, store.get("errors"), showError);
    const used = new Map([...picture.get("operations")].filter(([, each]) => each.get("count")));
    this.list("operations", used, mostFirst, used.size, showOperation);
    show(byId("relays"), picture.get("relays").size > 0);
    showReplication(picture.get("replication"));
  }

  /** One list: its rows, how many there are, and what stands there if there are none. */
  list(id, told, order, count, update) {
    const entries = [...told].sort(order);
    const whole = Math.max(count, entries.length);
    setText(byId(`${id}-count`), whole ? number(whole) : "");
    show(byId(`${id}-none`), !whole);
    show(byId(`${id}-more`), whole > entries.length);
    setText(byId(`${id}-more`), `and ${number(whole - entries.length)} more`);
    syncList(byId(`${id}-list`), entries, () => clone(`${id}-row`), update);
  }

  showWait(row, wait, key) {
    setText(part(row, "key"), key);
    showSince(part(row, "age"), wait.get("since"));
    const who = waiting(wait.get("ranks"), wait.get("count"), wait.get("others"));
    setText(part(row, "who"), wait.get("barrier") ? `at this barrier: ${who}` : who);
    const rank = wait.get("owed_by");
    show(part(row, "owed"), rank >= 0);
    if (rank < 0) return;
    const found = this.grid.find(rank);
    const host = found?.machine.host;
    const state = found ? STATES[found.letter] : "not known";
    const button = part(row, "rank");
    setText(button, host ? `rank ${rank} on ${host}` : `rank ${rank}`);
    button.onclick = () => this.grid.select(rank);
    const why = wait.get("barrier") ? "is missing there" : "should have written it";
    setText(part(row, "why"), ` (${state}) ${why}`);
  }
}

function showSince(element, moment, words = (text) => text) {
  if (moment === undefined) setText(element, "");
  else showAge(element, moment, (seconds) => words(duration(seconds)));
}

function showBarrier(row, barrier, key) {
  const [size, arrived] = [barrier.get("size"), barrier.get("arrived")];
  const bar = part(row, "bar");
  setText(part(row, "key"), key);
  showSince(part(row, "age"), barrier.get("since"));
  bar.setAttribute("aria-label", `arrived at ${visible(key)}`);
  bar.max = Math.max(size, 1);
  if (size >= 0) bar.value = Math.min(arrived, size);
  else bar.removeAttribute("value");
  setText(part(row, "figure"), number(arrived) + (size >= 0 ? ` of ${number(size)}` : " arrived"));
  const missing = barrier.get("missing") ?? null;
  const known = missing ? `missing: ${ranks(missing)}` : "";
  setText(part(row, "missing"), missing === null ? "who is missing is not known" : known);
  part(row, "missing").classList.toggle("bad", Boolean(missing));
}

function showMeeting(row, meeting, job) {
  const round = meeting.get("round");
  const restarted = round === 1 ? "restarted once" : `restarted ${number(round)} times`;
  setText(part(row, "name"), job ? `job ${job}` : "this job");
  setText(part(row, "figure"), round ? `round ${number(round)}, ${restarted}` : "first round");
  setText(part(row, "who"), describeMeeting(meeting));
  showLines(part(row, "told"), meeting.get("told"));
}

function describeMeeting(meeting) {
  const expected = meeting.get("expected");
  const joined = meeting.get("joined");
  const whole = expected >= 0 ? `${number(joined)} of ${counted(expected, "machine")}` : null;
  const words = { waiting: "waiting", spares: "spare", lost: "lost", sick: "not fit" };
  const named = Object.keys(words)
    .filter((name) => meeting.get(name).length)
    .map((name) => `${words[name]}: ${meeting.get(name).join(", ")}`);
  const closed = meeting.get("closed") ? [`closed: ${meeting.get("closed")}`] : [];
  return [`${whole ?? counted(joined, "machine")} joined`, ...named, ...closed].join("; ");
}

function showRelay(row, relay, path) {
  const depth = path.split("/").length - 1;
  const clients = relay.has("clients") ? counted(relay.get("clients"), "client") : "has told nothing yet";
  setText(part(row, "name"), "· ".repeat(depth) + (relay.get("host") ?? relay.get("peer")));
  setText(part(row, "figure"), clients);
  row.classList.toggle("bad", !relay.get("present") || relay.has("heard"));
  const age = part(row, "age");
  if (!relay.get("present")) showSince(age, relay.get("since"), () => "connection lost");
  else if (relay.has("heard")) showSince(age, relay.get("heard").get("since"), (text) => `silent: ${text}`);
  else showSince(age, relay.get("since"), (text) => `for ${text}`);
}

/** How a store stands that an engine keeps; nothing for others. */
function showReplication(told) {
  show(byId("replication"), told.size > 0);
  if (!told.size) return;
  const standbys = [...told.get("standbys")].map(([name, lag]) => `${name} (lag ${number(lag)})`);
  const term = told.get("term");
  const facts = [
    ["Kept by", told.get("engine")],
    ["Leader", told.get("leader")],
    ["Term", `${number(term)}: the lead has changed ${term === 2 ? "once" : `${number(term - 1)} times`}`],
    ["Standbys", standbys.join("\n") || "none: nobody would take over"],
    ["Commits", `p50 ${latency(told.get("commit_p50"))}, p99 ${latency(told.get("commit_p99"))}`],
    ["Log", `${bytes(told.get("log"))} since a checkpoint of ${bytes(told.get("checkpoint"))}`],
  ];
  syncList(byId("replication-facts"), facts, () => clone("fact-row"), (row, text, name) => {
    setText(part(row, "name"), name);
    setText(part(row, "value"), text);
  });
}

function showError(row, error) {
  const relay = error.has("at") ? ` (relay on ${error.get("at")})` : "";
  setText(part(row, "peer"), error.get("peer") + relay);
  setText(part(row, "time"), timeOfDay(error.get("since")));
  setText(part(row, "reason"), error.get("reason"));
}

function showOperation(row, each, name) {
  setText(part(row, "name"), name);
  setText(part(row, "count"), number(each.get("count")));
  setText(part(row, "rate"), number(Math.round(each.get("per_second"))));
}
