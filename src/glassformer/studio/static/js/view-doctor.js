/* The view "Doctor, size": examine the chosen model live, read the diagnosis, see the leak matrix; below, the size
 * sheet.
 *
 * Findings come one by one over Server-Sent Events; leaving the view or pressing Stop ends the examination.
 */
import { events } from "./api.js";
import { fill, h, number } from "./dom.js";
import { findingTable, verdictMark } from "./findings.js";
import { heatMap } from "./maps.js";
import { store } from "./store.js";
import { View, panel } from "./view.js";
import { sizePanels } from "./view-size.js";
import { Tensor } from "./tensors.js";

const BEFORE = "Comes with the examination.";
const FLOOR = 1e-9;
const places = (n) => Array.from({ length: n }, (_, i) => String(i));

/* "a/one, a/two: why": findings that say the same stand together. */
function seenBy(evidence) {
  const said = new Map();
  for (const finding of evidence) {
    const why = finding.evidence?.cause ?? finding.why;
    said.set(why, [...(said.get(why) ?? []), finding.id]);
  }
  return [...said].slice(0, 3).map(([why, ids]) => `${ids.join(", ")}: ${why}`).join("; ");
}

/* `told`: remedy to the diagnosis that told it first. */
function diagnosisCard(one, told) {
  const first = told.get(one.remedy);
  const facts = [
    ["where", one.place],
    ["seen by", seenBy(one.evidence)],
    ["remedy", first ? `as for ${first}` : one.remedy],
    ["probably follows", one.consequences.join(", ")],
  ].filter(([, text]) => text);
  return h("article", { class: "diagnosis" },
    h("h3", {}, verdictMark("fail", one.title), " ", h("code", { text: one.id })),
    h("dl", { class: "facts" }, facts.map(([name, text]) => [h("dt", { text: name }), h("dd", { text })])));
}

export class Doctor extends View {
  build() {
    this.buildExam();
    this.buildLeak();
    this.size = sizePanels(this);
    this.append(this.exam.root, this.leak.root, ...this.size.roots);
  }

  buildExam() {
    const click = () => (this.busy("doctor") ? this.stop("doctor") : this.examine());
    this.run = h("button", { class: "primary", text: "Examine", on: { click } });
    this.quick = h("input", { type: "checkbox", checked: true });
    this.exam = panel({
      title: "Doctor", name: "doctor", figure: () => (this.table.rows.length ? this.exam.body : null),
      python: () => ({ view: "doctor", model: store.get("model"), quick: this.quick.checked }),
      hint: "Runs the checks on the chosen model: the future must not change the past, a cache must not change the " +
        "answer, padding must be inert.",
    });
    this.exam.tools.append(h("label", { class: "check small" }, this.quick, "quick"), this.run);
    this.verdict = h("p", { class: "verdict-line", role: "status" });
    this.cards = h("div");
    this.notes = h("ul", { class: "notes soft small" });
    this.table = findingTable("Findings, as they come");
    this.empty = h("p", { class: "empty", text: "Nothing examined yet: press Examine." });
    this.exam.body.append(this.verdict, this.cards, this.empty, this.table.root, this.notes);
    this.table.root.hidden = true;
  }

  buildLeak() {
    this.leak = panel({
      title: "Leak matrix", name: "leak", figure: () => (this.matrix ? this.map.root : null),
      python: () => ({ view: "leak", model: store.get("model") }),
      hint: "Row t, column s: how much the answer at position t moves when token s changes. Above the diagonal lies " +
        "the future: it must be empty.",
    });
    const describe = (t, s) =>
      `answer at ${t}, token ${s} changed: ${this.moved(t, s)}${s > t ? " (future)" : ""}`;
    this.map = heatMap({ label: "Leak matrix", describe });
    this.noLeak = h("p", { class: "empty", text: BEFORE });
    this.map.root.hidden = true;
    this.leak.body.append(this.noLeak, this.map.root);
  }

  update(changed) {
    if (changed.has("model") || changed.has("state")) {
      if (this.examined && this.examined !== store.get("model")) this.clear();
      this.size.update(changed);
    }
  }

  clear() {
    this.stop("doctor");
    this.examined = null;
    this.matrix = null;
    this.remedies = new Map();
    this.table.clear();
    fill(this.cards);
    fill(this.notes);
    fill(this.verdict);
    this.table.root.hidden = this.map.root.hidden = true;
    this.empty.hidden = this.noLeak.hidden = false;
    this.noLeak.textContent = BEFORE;
    delete this.exam.root.dataset.ready;
  }

  async examine() {
    this.clear();
    this.examined = store.get("model");
    this.empty.hidden = true;
    this.table.root.hidden = false;
    this.run.textContent = "Stop";
    const say = (text) => fill(this.verdict, h("span", { class: "soft", text }));
    say(`Examining ${this.examined} …`);
    const body = { model: this.examined, quick: this.quick.checked };
    const done = await this.work(this.exam, "doctor", async (signal) => {
      for await (const { event, data } of events("doctor", { body, signal })) {
        if (event === "progress") say(`Examining ${this.examined}: ${data.what}, ${data.done} of ${data.of} …`);
        else if (event === "finding") this.table.add(data);
        else if (event === "diagnosis") this.tell(data);
        else if (event === "done") return data;
      }
      throw new Error("the examination ended before its verdict: press Examine again.");
    });
    this.run.textContent = "Examine";
    if (done) this.conclude(done);
    else if (this.examined) say("Not finished.");
  }

  tell(diagnosis) {
    this.cards.append(diagnosisCard(diagnosis, this.remedies));
    if (!this.remedies.has(diagnosis.remedy)) this.remedies.set(diagnosis.remedy, diagnosis.id);
    this.table.told(diagnosis.remedy);
  }

  conclude(done) {
    const counts = { pass: 0, fail: 0, skip: 0 };
    for (const { verdict } of this.table.rows) counts[verdict]++;
    const said = done.healthy ? "Healthy: no check failed." : "Sick: see the diagnosis.";
    const told = ` ${counts.pass} pass, ${counts.fail} fail, ${counts.skip} could not be examined.`;
    fill(this.verdict, verdictMark(done.healthy ? "pass" : "fail", said), h("span", { class: "soft", text: told }));
    this.table.failsFirst();
    fill(this.notes, done.notes.map((text) => h("li", { text })));
    if (done.leak) this.showLeak(done.leak);
    else this.noLeak.textContent = "No leak was met, so there is no matrix to show.";
    this.exam.root.dataset.ready = this.examined;
  }

  /* Leaks span many sizes: drawn by the power of ten, read out as measured. */
  showLeak(rows) {
    this.matrix = rows;
    const shape = [rows.length, rows[0].length];
    const data = Float32Array.from(rows.flat(), (v) => Math.log10(Math.max(FLOOR, Math.abs(Number(v)))));
    this.noLeak.hidden = true;
    this.map.root.hidden = false;
    this.map.draw({
      tensor: new Tensor("leak", "F32", shape, data), low: Math.log10(FLOOR), high: 1, rows: places(shape[0]),
      columns: places(shape[1]), rowTitle: "answer at", columnTitle: "token changed (colour: power of ten)",
      cell: [6, 32],
    });
  }

  moved(t, s) {
    const v = this.matrix?.[t]?.[s];
    return v === 0 ? "exactly 0" : number(v);
  }
}

customElements.define("glass-doctor", Doctor);
