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
const indices = (n) => Array.from({ length: n }, (_, i) => String(i));

/* "a/one, a/two: why": findings with the same explanation are listed together. */
function foundBy(evidence) {
  const byReason = new Map();
  for (const finding of evidence) {
    const why = finding.evidence?.cause ?? finding.why;
    byReason.set(why, [...(byReason.get(why) ?? []), finding.id]);
  }
  return [...byReason].slice(0, 3).map(([why, ids]) => `${ids.join(", ")}: ${why}`).join("; ");
}

/* `remedies`: for each remedy, the first diagnosis that shows it. */
function diagnosisCard(one, remedies) {
  const first = remedies.get(one.remedy);
  const facts = [
    ["where", one.location],
    ["found by", foundBy(one.evidence)],
    ["fix", first ? `same as for ${first}` : one.remedy],
    ["probably causes", one.consequences.join(", ")],
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
      hint: "Runs the checks on the selected model: causal masking, consistency of the KV cache, padding, and more.",
    });
    this.exam.tools.append(h("label", { class: "check small" }, this.quick, "quick"), this.run);
    this.verdict = h("p", { class: "verdict-line", role: "status" });
    this.cards = h("div");
    this.notes = h("ul", { class: "notes soft small" });
    this.table = findingTable("Findings");
    this.empty = h("p", { class: "empty", text: "No examination yet: press Examine." });
    this.exam.body.append(this.verdict, this.cards, this.empty, this.table.root, this.notes);
    this.table.root.hidden = true;
  }

  buildLeak() {
    this.leak = panel({
      title: "Leak matrix", name: "leak", figure: () => (this.matrix ? this.map.root : null),
      python: () => ({ view: "leak", model: store.get("model") }),
      hint: "Row t, column s: how much the output at position t changes when the token at position s changes. " +
        "In a causal model, everything above the diagonal is zero.",
    });
    const describe = (t, s) =>
      `output at ${t}, token ${s} changed: ${this.moved(t, s)}${s > t ? " (future)" : ""}`;
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
    const report = (text) => fill(this.verdict, h("span", { class: "soft", text }));
    report(`Examining ${this.examined} …`);
    const body = { model: this.examined, quick: this.quick.checked };
    const done = await this.work(this.exam, "doctor", async (signal) => {
      for await (const { event, data } of events("doctor", { body, signal })) {
        if (event === "progress") report(`Examining ${this.examined}: ${data.what}, ${data.done} of ${data.of} …`);
        else if (event === "finding") this.table.add(data);
        else if (event === "diagnosis") this.addDiagnosis(data);
        else if (event === "done") return data;
      }
      throw new Error("the examination ended before its verdict: press Examine again.");
    });
    this.run.textContent = "Examine";
    if (done) this.conclude(done);
    else if (this.examined) report("Not finished.");
  }

  addDiagnosis(diagnosis) {
    this.cards.append(diagnosisCard(diagnosis, this.remedies));
    if (!this.remedies.has(diagnosis.remedy)) this.remedies.set(diagnosis.remedy, diagnosis.id);
    this.table.hideRemedy(diagnosis.remedy);
  }

  conclude(done) {
    const counts = { pass: 0, fail: 0, skip: 0 };
    for (const { verdict } of this.table.rows) counts[verdict]++;
    const verdict = done.healthy ? "Healthy: no check failed." : "Not healthy: see the diagnosis.";
    const text = ` ${counts.pass} passed, ${counts.fail} failed, ${counts.skip} skipped.`;
    fill(this.verdict, verdictMark(done.healthy ? "pass" : "fail", verdict), h("span", { class: "soft", text }));
    this.table.failsFirst();
    fill(this.notes, done.notes.map((text) => h("li", { text })));
    if (done.leak) this.showLeak(done.leak);
    else this.noLeak.textContent = "There is no leak matrix for this model.";
    this.exam.root.dataset.ready = this.examined;
  }

  /* Leaks span many orders of magnitude: the colour shows the logarithm, the read-out the measured value. */
  showLeak(rows) {
    this.matrix = rows;
    const shape = [rows.length, rows[0].length];
    const data = Float32Array.from(rows.flat(), (v) => Math.log10(Math.max(FLOOR, Math.abs(Number(v)))));
    this.noLeak.hidden = true;
    this.map.root.hidden = false;
    this.map.draw({
      tensor: new Tensor("leak", "F32", shape, data), low: Math.log10(FLOOR), high: 1, rows: indices(shape[0]),
      columns: indices(shape[1]), rowTitle: "output at", columnTitle: "token changed (colour: log10)",
      cell: [6, 32],
    });
  }

  moved(t, s) {
    const v = this.matrix?.[t]?.[s];
    return v === 0 ? "exactly 0" : number(v);
  }
}

customElements.define("glass-doctor", Doctor);
