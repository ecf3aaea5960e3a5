// The summary: the headline with the missing ranks, the figures, the machines with trouble.

import { MISSING, STATES } from "./cells.js";
import { byId, clone, part, setText, show, showAge, showLines, syncList } from "./dom.js";
import { nameOf } from "./painting.js";
import { bytes, counted, duration, latency, number } from "./text.js";

const MOST_MACHINES = 12;
const TILES_FROM = 25; // from this number on, the map does not name all machines
const RECENT_SECONDS = 10;
const STALLED_SECONDS = 10;

export class Summary {
  constructor(grid) {
    this.grid = grid;
  }

  update(picture) {
    showHeadline(picture.get("counts"), picture.get("stall") || picture.get("idle").has("since"));
    for (const name of ["missing", "unseen"]) {
      show(byId(name), Boolean(picture.get(name)));
      setText(byId(`${name}-text`), picture.get(name));
    }
    showEngineAway(picture.get("replication"));
    showLongestWait(picture.get("waits"), picture.get("store").get("stalled").get("since"));
    showLines(byId("remarks"), picture.get("remarks"));
    showTiles(picture.get("counts"), picture.get("store"), picture.get("history"));
    this.showTrouble();
  }

  /** Machines with missing ranks, where the map does not name them all. */
  showTrouble() {
    const isMany = this.grid.machines.size >= TILES_FROM;
    const found = isMany ? this.grid.troubled() : [];
    show(byId("only-trouble-label"), isMany);
    show(byId("trouble"), found.length > 0);
    const entries = found.slice(0, MOST_MACHINES).map((each) => [each.machine.host, each]);
    syncList(byId("trouble-list"), entries, () => clone("trouble-row"), (row, { machine, missing }) => {
      const { ranks, states } = machine;
      const button = part(row, "host");
      setText(button, nameOf(machine));
      button.onclick = () => this.grid.select(ranks[states.findIndex((letter) => MISSING.has(letter))]);
      setText(part(row, "figure"), `${number(ranks.length - missing)} of ${number(ranks.length)} here`);
    });
    show(byId("trouble-more"), found.length > MOST_MACHINES);
    setText(byId("trouble-more"), `and ${counted(found.length - MOST_MACHINES, "more machine")}`);
  }
}

function showHeadline(counts, stall) {
  const title = headlineOf(counts);
  const missing = counts.get("late") + counts.get("gone");
  setText(byId("headline"), title);
  byId("summary").classList.toggle("complete", counts.get("complete"));
  byId("next-missing").disabled = !missing;
  const news = [stall && "no progress", missing && `${number(missing)} missing`].filter(Boolean);
  document.title = [...news, title, "Rallypoint"].join(" · ");
}

/** As `rallypoint status` says it. */
function headlineOf(counts) {
  const [present, expected, unknown] = ["present", "expected", "unknown"].map((name) => counts.get(name));
  const strangers = unknown ? `, and ${counted(unknown, "client")} whose rank is not known` : "";
  if (expected < 0) return `${counted(present, "rank")} joined${strangers}`;
  if (counts.get("complete")) return `All ${number(expected)} ranks joined${strangers}`;
  return `${number(present)} of ${number(expected)} ranks joined${strangers}`;
}

/** Of a store that an engine keeps, while that does not answer. */
function showEngineAway(replication) {
  const since = replication.get("away")?.get("since");
  show(byId("engine-away"), since !== undefined);
  if (since === undefined) return;
  showAge(byId("engine-away-age"), since, duration);
  setText(byId("engine-away-text"), replication.get("error"));
}

function showLongestWait(waits, stalledSince) {
  const since = ([, wait]) => wait.get("since") ?? Infinity;
  const longest = [...waits].sort((one, other) => since(one) - since(other))[0];
  show(byId("longest"), longest !== undefined);
  if (!longest) return;
  setText(byId("longest-key"), longest[0]);
  showAge(byId("longest-age"), since(longest), duration);
  showAge(byId("stalled"), stalledSince, (seconds) =>
    seconds < STALLED_SECONDS ? "" : `nobody has progressed for ${duration(seconds)}`,
  );
}

function showTiles(counts, store, history) {
  for (const name of Object.values(STATES)) {
    // Ranks that wait have joined as well.
    const count = counts.get(name === "joined" ? "present" : name);
    setText(byId(`count-${name}`), number(count));
    byId(`tile-${name}`).classList.toggle("none", !count);
  }
  show(byId("tile-unseen"), counts.get("unseen") > 0);
  // In a quiet second, nothing may have been timed.
  const timed = [...history.values()].slice(-RECENT_SECONDS).filter(([, p99]) => p99 >= 0);
  setText(byId("count-p99"), latency(timed.at(-1)?.[1] ?? -1));
  setText(byId("count-rate"), number(Math.round(store.get("per_second"))));
  setText(byId("count-connections"), number(store.get("connections")));
  setText(byId("count-keys"), number(store.get("keys") + store.get("queues")));
  setText(byId("keys-bytes"), bytes(store.get("bytes")));
}
