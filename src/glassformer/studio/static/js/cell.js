/* The exact arithmetic of one element: its terms, what is added, and the value that the model computed.
 *
 *   cellPanel(view) -> {root, ask(site, index), reset(site)}
 */
import { post } from "./api.js";
import { fill, h, mathml, number } from "./dom.js";
import { heatMap } from "./maps.js";
import { store } from "./store.js";
import { panel } from "./view.js";
import { Tensor } from "./tensors.js";

const LISTED = 12;

export function cellPanel(view) {
  const at = { site: null, index: null, answer: null };
  const where = panel({
    title: "One element", name: "cell", wide: true, figure: () => (at.answer ? body : null),
    python: () => ({ view: "cell", ...store.about, site: at.site, index: at.index }),
    hint: "Select an element of the tensor above to see how it is computed, term by term.",
  });
  const body = h("div", {});
  const strips = heatMap({
    label: "The two vectors and their product, component by component",
    describe: (row, i) => {
      const term = at.answer.terms[i];
      return `${term.label}: ${number(term.a, 5)} × ${number(term.b, 5)} = ${number(term.product, 5)}`;
    },
  });
  where.body.append(body);

  function reset(site) {
    if (at.site === site && at.key === key()) return;
    view.stop("cell");
    at.answer = null;
    fill(body);
  }

  const key = () => `${JSON.stringify(store.about)} ${at.index}`;

  async function ask(site, index) {
    Object.assign(at, { site, index });
    at.key = key();
    const request = { ...store.about, site, index };
    const got = await view.work(where, "cell", (signal) => post("cell", request, { signal }));
    if (!got) return;
    at.answer = got;
    draw(got);
  }

  /* Each row is scaled by its largest value; the read-out and the table show the numbers. */
  function stripes(terms) {
    const rows = [terms.map((one) => one.a), terms.map((one) => one.b), terms.map((one) => one.product)];
    const data = new Float32Array(rows.flatMap((row) => {
      const most = Math.max(...row.map(Math.abs)) || 1;
      return row.map((v) => v / most);
    }));
    return new Tensor("terms", "F32", [3, terms.length], data);
  }

  function draw(got) {
    const element = `${got.site}[${got.index.join(", ")}]`;
    const value = got.value === null ? "−∞" : number(got.value, 7);
    const added = Object.entries(got.added ?? {});
    const sum = [
      `${got.scale === 1 ? "" : `${number(got.scale, 5)} · `}Σ (${got.n_terms} products)`,
      ...added.map(([name, v]) => `${name} ${number(v, 5)}`)
    ].join(" + ");
    const largest = [...got.terms].sort((a, b) => Math.abs(b.product) - Math.abs(a.product)).slice(0, LISTED);
    const cells = (one) => [one.label, number(one.a, 5), number(one.b, 5), number(one.product, 5)].map((text, i) => h(
      "td", { class: i ? "n" : "", text },
    ));
    const shown = largest.reduce((total, one) => total + one.product, 0);
    const all = got.terms.reduce((total, one) => total + one.product, 0) + got.rest;
    const rest = got.n_terms > largest.length
      ? h(
        "tr", {}, h("td", { colspan: 3, class: "soft", text: `${got.n_terms - largest.length} others` }),
        h("td", { class: "n soft", text: number(all - shown, 5) }),
      ) : null;
    fill(body, h(
      "div", { class: "row" }, h("div", { class: "formula" }, mathml(got.mathml)),
      h("b", { class: "mono", text: `${element} = ${value}` }),
    ),
      h("p", { text: got.a ? `${got.a} · ${got.b}` : "" }), got.note ? h("p", { class: "soft", text: got.note }) : null,
      got.terms.length > 1 ? strips.root : null,
      h("table", { class: "terms" }, h(
        "thead", {},
        h("tr", {}, ["largest terms", "a", "b", "a · b"].map((text, i) => h("th", { text, class: i ? "n" : "" }))),
      ),
        h("tbody", {}, largest.map((one) => h("tr", {}, cells(one))), rest,
          h(
            "tr", {}, h("td", { colspan: 3, text: sum }),
            h("td", { class: "n" }, h("b", { text: number(got.computed, 7) })),
          ),
          h(
            "tr", {}, h("td", { colspan: 3, text: "value in the model" }),
            h("td", { class: "n" }, h("b", { text: value })),
          ))));
    if (got.terms.length > 1)
      strips.draw({
        tensor: stripes(got.terms), scale: "rdbu", low: -1, high: 1, rows: ["a", "b", "a·b"], cell: [2, 24],
        square: false, height: 60,
      });
  }

  return { root: where.root, ask, reset };
}
