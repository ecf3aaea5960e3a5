// Numbers, times and names as text.

const numbers = new Intl.NumberFormat("en-US");
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export const number = (value) => numbers.format(value);

export const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

/** `0.4 s`, `41 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`. */
export function duration(seconds) {
  if (seconds < 10) return `${Math.max(seconds, 0).toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** The time of day of a moment in seconds. */
export const timeOfDay = (seconds) => clock.format(new Date(seconds * 1000));

const significant = (value) => (value >= 100 ? value.toFixed(0) : Number(value.toPrecision(2)).toString());

/** `12 µs`, `1.3 ms`, `2.1 s`; of none, a dash. */
export function latency(seconds) {
  if (seconds < 0) return "–";
  if (seconds < 0.9995e-3) return `${significant(seconds * 1e6)} µs`;
  return seconds < 0.9995 ? `${significant(seconds * 1e3)} ms` : `${significant(seconds)} s`;
}

/** `2.5 / s`, `one in 50 s`, `no steps of late`. */
export function stepRate(perSecond) {
  if (!perSecond) return "no steps of late";
  return perSecond < 0.1 ? `one in ${duration(1 / perSecond)}` : `${number(perSecond)} / s`;
}

export function bytes(count) {
  if (count < 1000) return counted(count, "byte");
  const units = ["kB", "MB", "GB", "TB"];
  let value = count / 1000;
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${significant(value)} ${units[unit]}`;
}

/** Ranges as the server sends them (`0-5,7`), for people: `0–5, 7`. */
export const ranks = (ranges) => ranges.replaceAll("-", "–").replaceAll(",", ", ");

/** `rank 3`, `ranks 0–5, 7 and 2 clients`. */
export function waiting(ranges, count, others) {
  const known = count ? [`${count === 1 ? "rank" : "ranks"} ${ranks(ranges)}`] : [];
  return [...known, ...(others ? [counted(others, "client")] : [])].join(" and ");
}

/** The text with control characters made visible; nothing in it can be obeyed. */
export const visible = (text) =>
  text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (each) => {
    const code = each.charCodeAt(0);
    return code < 32 ? String.fromCharCode(0x2400 + code) : `\\u${code.toString(16).padStart(4, "0")}`;
  });
