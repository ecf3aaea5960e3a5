// The live picture of the store: events from the server, and coming back when they stop.

const FIRST_PAUSE = 0.5;
const LONGEST_PAUSE = 8;
const LEAST_SILENCE = 15; // seconds; the server asks the store once a second, and waits five for its answer

export class Stream {
  /**
   * `onPicture` is given each picture, a Map; `onLost` why there is none and in how many seconds the next
   * try is made.
   */
  constructor(onPicture, onLost) {
    this.onPicture = onPicture;
    this.onLost = onLost;
    this.picture = null;
    this.pause = FIRST_PAUSE;
    this.heard = 0;
    setInterval(() => this.checkSilence(), 1000);
    addEventListener("online", () => this.tryNow());
    document.addEventListener("visibilitychange", () => document.hidden || this.tryNow());
    this.open();
  }

  open() {
    this.source?.close();
    clearTimeout(this.timer);
    this.timer = null;
    this.heard = Date.now();
    const source = new EventSource("events");
    source.addEventListener("whole", (event) => this.take(source, event, new Map()));
    source.addEventListener("change", (event) => this.take(source, event, this.picture));
    source.addEventListener("error", () => this.fail(source));
    this.source = source;
  }

  /** If it waits for its next try, make that at once. */
  tryNow() {
    if (this.timer) this.open();
  }

  take(source, event, before) {
    if (source !== this.source) return;
    this.picture = merge(before, JSON.parse(event.data));
    this.pause = FIRST_PAUSE;
    this.heard = Date.now();
    this.onPicture(this.picture);
  }

  async fail(source) {
    if (source !== this.source || this.timer) return;
    source.close();
    const pause = this.pause * (0.75 + Math.random() / 2);
    this.pause = Math.min(this.pause * 2, LONGEST_PAUSE);
    this.timer = setTimeout(() => this.open(), pause * 1000);
    this.onLost(await whyLost(), pause);
  }

  checkSilence() {
    const most = Math.max(LEAST_SILENCE, 3 * (this.picture?.get("every") ?? 0));
    if (!this.timer && Date.now() - this.heard > most * 1000) this.fail(this.source);
  }
}

/** An event source does not say why it failed: another request does. */
async function whyLost() {
  try {
    const { status } = await fetch("healthz", { signal: AbortSignal.timeout(4000) });
    if (status === 401) return "It wants the token again: load this page anew.";
    return "It answers, but sends no news: too many pages may be open.";
  } catch {
    return "It does not answer: the process that serves this page has ended, or is out of reach.";
  }
}

// A JSON merge patch (RFC 7396), applied to Maps: names come from the network, and "__proto__" may be one.

const isObject = (value) => typeof value === "object" && !Array.isArray(value);

/** Patch a Map in place, and return it; what is no Map yet becomes one. */
export function merge(target, patch) {
  const result = target instanceof Map ? target : new Map();
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) result.delete(name);
    else if (isObject(value)) result.set(name, merge(result.get(name), value));
    else result.set(name, value);
  }
  return result;
}
