/* The text of every token, requested once per model; and a control to select a token.
 *
 *   vocabulary(model) -> promise of an array of texts
 *   tokenChoice({label, change, none}) -> {root, get id, set id, offer([{id, piece, p}])}   a list of options;
 *        `none` is the text of the first entry, which means no token
 */
import { post } from "./api.js";
import { field, fill, h, percent, visible } from "./dom.js";

const known = new Map();

export function vocabulary(model) {
  if (!known.has(model)) {
    const request = post("vocabulary", { model }).then((response) => response.pieces);
    request.catch(() => known.delete(model)); // repeat the request next time
    known.set(model, request);
  }
  return known.get(model);
}

export function tokenChoice({ label, change, none }) {
  const select = h("select", { class: "mono", on: { change: () => change?.(chosen()) } });
  const chosen = () => (select.value === "" ? null : Number(select.value));
  return {
    root: field(label, select),
    get id() {
      return chosen();
    },
    set id(id) {
      select.value = id === null ? "" : String(id);
    },
    offer(tokens) {
      const selected = select.value;
      const rows = tokens.map((one) =>
        h(
          "option", { value: one.id, text: `${visible(one.piece)}${one.p === undefined ? ""
            : `   ${percent(one.p)}`}` },
        ));
      fill(select, none && h("option", { value: "", text: none }), rows);
      select.value = [...select.options].some((option) => option.value === selected) ? selected : (
        select.options[0]?.value ?? ""
      );
    },
  };
}
