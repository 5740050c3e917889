/* Logit attribution: what each component adds to one logit (or to the difference of two) at one position.
 *
 *   attribution(view) -> {root, ask()}
 */
import { post } from "./api.js";
import { bars, plot } from "./charts.js";
import { h, number, visible } from "./dom.js";
import { store } from "./store.js";
import { panel } from "./view.js";
import { tokenChoice, vocabulary } from "./vocabulary.js";

const SHOWN = 24;

export function attribution(view) {
  const at = { body: null };
  const where = panel({
    title: "Contributions to a logit", name: "attribution", wide: true, figure: () => (at.body ? chart : null),
    python: () => ({ view: "attribution", ...at.body }),
  });
  const answer = tokenChoice({
    label: "Token", change: (id) => store.set({ answer: id === null ? null : String(id) }, { replace: true }),
    none: "the most likely one",
  });
  const wrong = tokenChoice({
    label: "minus the logit of",
    change: (id) => store.set({ wrong: id === null ? null : String(id) }, { replace: true }), none: "nothing",
  });
  const summary = h("p", { class: "small" });
  const chart = h("div", { "aria-label": "Contribution of each component" });
  where.body.append(h("div", { class: "row" }, answer.root, wrong.root), summary, chart);

  const asNumber = (key) => (/^\d+$/.test(store.get(key) ?? "") ? Number(store.get(key)) : null);

  async function offer(model) {
    const words = await vocabulary(model);
    const all = words.slice(0, 2000).map((piece, id) => ({ id, piece }));
    for (const key of ["answer", "wrong"]) {
      const id = asNumber(key);
      if (id !== null && id >= 2000 && id < words.length) all.push({ id, piece: words[id] });
    }
    for (const [choice, key] of [[answer, "answer"], [wrong, "wrong"]]) {
      choice.offer(all);
      choice.id = asNumber(key);
    }
    return words;
  }

  async function ask() {
    if (!store.ids.length) return;
    const about = store.about;
    const last = store.words.length - 1;
    const got = await view.work(where, "attribution", async (signal) => {
      const words = await offer(about.model);
      const inside = (id) => (id !== null && id < words.length ? id : null);
      const body = {
        ...about, position: Math.min(store.get("token") ?? last, last),
        answer: inside(asNumber("answer")), wrong: inside(asNumber("wrong")),
      };
      return { body, ...(await post("attribution", body, { signal })) };
    });
    if (!got) return;
    at.body = { ...got.body, answer: got.answer.id };
    draw(got);
  }

  function draw(got) {
    const parts = got.names.map((name, i) => [name, got.values[i]]).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
    const shown = parts.slice(0, SHOWN);
    const rest = parts.slice(SHOWN);
    if (rest.length) shown.push([`${rest.length} others`, rest.reduce((sum, one) => sum + one[1], 0)]);
    const what = `logit of “${visible(got.answer.piece)}”${got.wrong ? ` minus that of “${visible(got.wrong.piece)}”`
      : ""}`;
    const sum = got.values.reduce((total, v) => total + v, 0);
    summary.textContent =
      `After “${visible(store.words[got.position] ?? "")}” the ${what} is ${number(got.logit, 5)}; the sum of the ` +
      `components is ${number(sum, 5)}. ${got.note}`;
    where.root.dataset.logit = got.logit;
    const [up, down] = [shown.map(([, v]) => Math.max(0, v)), shown.map(([, v]) => Math.min(0, v))];
    const names = shown.map(([name]) => name);
    plot(chart, [
      bars(names, up, { name: "increases it", colour: "accent", horizontal: true }),
      bars(names, down, { name: "decreases it", colour: "orange", horizontal: true }),
    ], {
      height: 60 + 19 * names.length, barmode: "relative", bargap: 0.25, yaxis: {
        autorange: "reversed", tickfont: { size: 10.5 },
      }, xaxis: { title: what },
    });
  }

  return { root: where.root, ask };
}
