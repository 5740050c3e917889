/* The server's words with formulas.
 *
 *   prose(value) -> [node, ...]   value: plain text, or a list of pieces {text} and {mathml, display}
 *
 * MathML comes from our own server, made from our own LaTeX; it is parsed, never set as HTML. Text stays text.
 */
import { h, mathml } from "./dom.js";

function piece(one) {
  if (typeof one === "string") return one;
  if (one.mathml === undefined) return one.text ?? "";
  const drawn = mathml(one.mathml);
  return one.display ? h("div", { class: "formula" }, drawn) : drawn;
}

export const prose = (value) => (Array.isArray(value) ? value.map(piece) : [value ?? ""]);
