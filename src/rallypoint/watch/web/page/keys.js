// Keys with search, and the beginning of a value: as text or hexadecimal digits, and never as anything else.

import { ask, byId, clone, part, setText, show, syncList } from "./dom.js";
import { bytes, counted, number, visible } from "./text.js";

const TYPING_PAUSE = 250; // milliseconds
const LEAST_PAUSE = 2000;
const WIDTH = 16; // bytes in a line of digits
const byName = new Intl.Collator("en", { numeric: true });

export class Keys {
  constructor() {
    this.search = byId("keys-search");
    this.count = null;
    this.asked = 0;
    this.key = null;
    this.search.addEventListener("input", () => this.askSoon(TYPING_PAUSE));
    byId("keys-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    for (const radio of document.getElementsByName("value-form")) {
      radio.addEventListener("change", () => this.showValue());
    }
    byId("value-close").addEventListener("click", () => this.close());
    document.addEventListener("keydown", (event) => {
      if (event.key === "/" && !isTyping(event.target)) {
        event.preventDefault();
        this.search.focus();
      }
    });
  }

  /** Take the number of keys: if it has changed, ask again, but not too often. */
  update(count, every) {
    if (count === this.count) return;
    this.count = count;
    const pause = Math.max(LEAST_PAUSE, every * 2000);
    if (!this.timer) this.askSoon(Math.max(0, this.asked + pause - Date.now()));
  }

  askSoon(milliseconds) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), milliseconds);
  }

  async ask() {
    clearTimeout(this.timer);
    this.timer = null;
    this.asked = Date.now();
    const search = this.search.value;
    const answer = await ask(`api/keys?search=${encodeURIComponent(search)}`);
    if (!answer || search !== this.search.value) return;
    if (answer.isAnswer) this.show(answer.told, search);
    else setText(byId("keys-summary"), answer.told.message);
  }

  show({ keys, found, count }, search) {
    const whole = search ? `${number(found)} of ${counted(count, "key")}` : counted(found, "key");
    const shown = found > keys.length ? `; the first ${number(keys.length)} are shown` : "";
    setText(byId("keys-summary"), whole + shown);
    show(byId("keys-body"), keys.length > 0 || this.key !== null);
    const entries = keys.map((each) => [each.key, each]).sort(([one], [other]) => byName.compare(one, other));
    syncList(byId("keys-list"), entries, () => clone("keys-row"), (row, each, key) => {
      const button = part(row, "key");
      setText(button, key || "(no name)");
      button.onclick = () => this.open(key);
      button.setAttribute("aria-pressed", String(key === this.key));
      const queued = each.queued ? `${counted(each.queued, "value")}, ` : "";
      setText(part(row, "size"), queued + bytes(each.size));
      setText(part(row, "writer"), each.writer || "not known");
    });
  }

  async open(key) {
    this.key = key;
    for (const button of byId("keys-list").querySelectorAll("button")) {
      button.setAttribute("aria-pressed", String(button.closest("tr").dataset.key === key));
    }
    // As JSON, as a key may be bytes that are no text, which an address cannot hold.
    const answer = await ask(`api/value?key=${encodeURIComponent(JSON.stringify(key))}`);
    if (!answer || key !== this.key) return;
    const { isAnswer, told } = answer;
    show(byId("value"), true);
    setText(byId("value-key"), key);
    this.value = isAnswer ? fromDigits(told.data) : null;
    const length = this.value?.length;
    const cut = length < told.size ? `the first ${number(length)} of ` : "";
    setText(byId("value-size"), isAnswer ? cut + bytes(told.size) : told.message);
    const form = this.value && asText(this.value) === null ? "hex" : "text";
    for (const radio of document.getElementsByName("value-form")) radio.checked = radio.value === form;
    this.showValue();
  }

  showValue() {
    const isHex = document.querySelector("[name=value-form]:checked").value === "hex";
    const value = this.value ?? new Uint8Array();
    setText(byId("value-content"), isHex ? asDigits(value) : (asText(value) ?? lossyText(value)));
  }

  close() {
    this.key = null;
    show(byId("value"), false);
    this.search.focus();
  }
}

const isTyping = (element) => element.matches("input, textarea, select");

export function fromDigits(digits) {
  const found = new Uint8Array(digits.length / 2);
  for (let at = 0; at < found.length; at += 1) found[at] = parseInt(digits.slice(2 * at, 2 * at + 2), 16);
  return found;
}

/** The text that bytes are; null if they are none. A character that was cut off at the end does not count. */
export function asText(value) {
  for (let cut = 0; cut < 4 && cut <= value.length; cut += 1) {
    try {
      const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
      const text = decoder.decode(value.slice(0, value.length - cut));
      return /[\u0000-\u0008\u000e-\u001a]/.test(text) ? null : visible(text);
    } catch {
      continue;
    }
  }
  return null;
}

const lossyText = (value) => visible(new TextDecoder().decode(value));

/** Lines of an offset, sixteen bytes, and what they are in ASCII. */
export function asDigits(value) {
  const lines = [];
  for (let at = 0; at < value.length; at += WIDTH) {
    const row = [...value.slice(at, at + WIDTH)];
    const digits = row.map((byte) => byte.toString(16).padStart(2, "0")).join(" ").padEnd(WIDTH * 3);
    const letters = row.map((byte) => (byte >= 32 && byte < 127 ? String.fromCharCode(byte) : ".")).join("");
    lines.push(`${at.toString(16).padStart(4, "0")}  ${digits} ${letters}`);
  }
  return lines.join("\n");
}
