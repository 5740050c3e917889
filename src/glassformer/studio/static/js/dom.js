/* Helpers for the DOM, and formatting of numbers.
 *
 *   h(tag, props, ...children)   an element; props: text, on: {event: f}, style: {prop: value}, dataset: {}, attributes
 *   svg(tag, props, ...children) the same in the SVG namespace
 *   fill(node, ...children)      replace the children
 *   mathml(string)               the server's MathML as a node
 *   toast(message, kind)         a short notification ("error", "info"); shell.js shows it
 *   inspect(title, ...nodes)     show this in the inspector on the right
 *   field(label, control, hint)  a labelled control;  slider({...}) a labelled range with its value (see below)
 *   number, percent, count, bytes, millis   numbers as text;  visible(piece) a token with visible whitespace
 *   later(f, ms)                 call f once there was no call for ms (debounce)
 *
 * User text is only set as text: nothing in the page is parsed as HTML except the server's MathML.
 */

function assemble(node, props, children) {
  for (const [key, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "text") node.textContent = value;
    else if (key === "on") for (const [name, f] of Object.entries(value)) node.addEventListener(name, f);
    else if (key === "style") for (const [name, v] of Object.entries(value)) node.style.setProperty(name, v);
    else if (key === "dataset") Object.assign(node.dataset, value);
    else if (key === "value" || key === "checked" || key === "disabled") node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const h = (tag, props, ...children) => assemble(document.createElement(tag), props, children);

export const svg = (tag, props, ...children) =>
  assemble(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);

export function fill(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

export function mathml(string) {
  const parsed = new DOMParser().parseFromString(string ?? "", "text/html").querySelector("math");
  return parsed ? document.adoptNode(parsed) : document.createTextNode(string ?? "");
}

export function toast(message, kind = "error") {
  document.dispatchEvent(new CustomEvent("glass-toast", { detail: { message, kind } }));
}

export function inspect(title, ...nodes) {
  document.dispatchEvent(new CustomEvent("glass-inspect", { detail: { title, nodes: nodes.flat() } }));
}

let fields = 0;

export function field(label, control, hint) {
  control.id ||= `field-${++fields}`;
  const about = hint && h("small", { class: "hint", id: `${control.id}-hint`, text: hint });
  if (about) control.setAttribute("aria-describedby", about.id);
  return h("div", { class: "field" }, h("label", { for: control.id, text: label }), control, about);
}

/* slider({label, min, max, step, value, format, input}) -> {root, control, get value, set value, show(value)}
 * input(value) is called while the slider moves. `scale: "log"` moves in equal factors. */
export function slider({ label, min, max, step = 1, value, format = String, input, scale = "linear", hint }) {
  const log = scale === "log";
  const into = (v) => (log ? Math.log(v) : v);
  const outof = (v) => (log ? Math.exp(Number(v)) : Number(v));
  const control = h("input", { type: "range", min: into(min), max: into(max), step: log ? "any" : step, title: hint });
  control.value = into(value);
  const output = h("output", { text: format(value) });
  const root = field(label, control);
  root.classList.add("slider");
  root.append(output);
  output.setAttribute("for", control.id);
  const show = () => {
    output.textContent = format(outof(control.value));
    control.setAttribute("aria-valuetext", output.textContent);
  };
  control.addEventListener("input", () => (show(), input?.(outof(control.value))));
  show();
  return {
    root,
    control,
    get value() {
      return outof(control.value);
    },
    set value(v) {
      control.value = into(v);
      show();
    },
  };
}

export function number(x, digits = 3) {
  if (x === null || x === undefined) return "–";
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "–" : x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  const text =
    size !== 0 && (size >= 1e6 || size < 1e-3) ? x.toExponential(Math.max(0, digits - 1))
      : String(Number(x.toPrecision(digits)));
  return text.replace("-", "−");
}

export const percent = (p, digits = 1) => (p === null || p === undefined ? "–" : `${(100 * p).toFixed(digits)} %`);

export function count(n) {
  for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]])
    if (Math.abs(n) >= size) return `${Number((n / (unit === "k" ? 1e3 : size)).toPrecision(3))} ${unit}`;
  return String(n);
}

export function bytes(n) {
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (n >= size) return `${Number((n / size).toPrecision(3))} ${unit}`;
  return `${n} B`;
}

export const millis = (ms) => (ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${ms.toFixed(ms < 10 ? 2 : 0)} ms`);

export function visible(piece) {
  const shown = String(piece).replace(/ /g, "·").replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/\r/g, "␍");
  return shown === "" ? "∅" : shown;
}

export function later(f, ms) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => f(...args), ms);
  };
}
