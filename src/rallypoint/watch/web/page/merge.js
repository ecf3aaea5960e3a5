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
