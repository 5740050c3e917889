/* Findings on the page: the measured value, its bound, and the explanation.
 *
 *   verdictMark(verdict, text)   "pass", "fail", "skip" or another word, marked by colour and sign
 *   relation(finding)            "3.1e−15 ≤ 1e−10", "0.3 ≤ 0.5", "" if nothing was measured
 *   findingTable(caption, {kinds})   -> {root, add(finding), hideRemedy(remedy), failsFirst(), clear(), rows}; rows are
 *                                added one by one. Each remedy is shown once, under the first finding that has it, and
 *                                not at all after hideRemedy(remedy); kinds: a column for the kind of evidence
 *   evidenceText(evidence)       the evidence in one line, long lists shortened
 */
import { h, number } from "./dom.js";

const SIGNS = { pass: "✓", rejected: "✓", fail: "✗", skip: "–" };

export function verdictMark(verdict, text = verdict) {
  const sign = SIGNS[verdict] ?? "·";
  return h("span", { class: "verdict", dataset: { verdict: verdict ?? "none" } },
    h("span", { class: "sign", "aria-hidden": "true", text: sign }), text);
}

/* Numbers that JSON cannot represent are sent as text. */
const SPECIAL = { inf: Infinity, "-inf": -Infinity, nan: NaN };
const valueOf = (x) => SPECIAL[x] ?? Number(x);
const formatNumber = (x) => (Number.isNaN(valueOf(x)) ? "NaN" : number(valueOf(x)));

export function relation({ measured, bound, low }) {
  if (measured === null || measured === undefined) return "";
  const sign = (a, b) => (valueOf(a) <= valueOf(b) ? "≤" : "≰");
  let text = formatNumber(measured);
  if (bound !== null && bound !== undefined) text = `${text} ${sign(measured, bound)} ${formatNumber(bound)}`;
  if (low !== null && low !== undefined) text = `${formatNumber(low)} ${sign(low, measured)} ${text}`;
  return text;
}

const MANY = 8;

function short(value) {
  if (Array.isArray(value)) {
    const shown = value.slice(0, MANY).map(short).join(", ");
    return `[${shown}${value.length > MANY ? `, … ${value.length} in total` : ""}]`;
  }
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : number(value);
  if (value && typeof value === "object") return Object.entries(value).map(([k, v]) => `${k} ${short(v)}`).join(", ");
  return String(value);
}

export function evidenceText(evidence) {
  return Object.entries(evidence ?? {})
    .filter(([name, value]) => name !== "kind" && name !== "parts" && !isMatrix(value))
    .map(([name, value]) => `${name} = ${short(value)}`)
    .join("; ");
}

const isMatrix = (value) => Array.isArray(value) && value.length > 1 && value.every((row) => Array.isArray(row));

function cells(finding, kinds, remedy) {
  const evidence = evidenceText(finding.evidence);
  return [
    h("td", {}, verdictMark(finding.verdict)),
    h("th", { scope: "row" }, h("span", { class: "finding-id", text: finding.id }),
      finding.family && h("span", { class: "finding-family", text: finding.family }),
      h("span", { class: "finding-why", text: finding.why ?? "" }),
      remedy && h("span", { class: "finding-remedy", dataset: { remedy }, text: `Fix: ${remedy}` }),
      evidence && h("details", { class: "finding-evidence" }, h("summary", { text: "evidence" }),
        h("p", { text: evidence }))),
    h("td", { class: "num", text: relation(finding) }),
    kinds && h("td", { class: "soft", text: finding.evidence?.kind ?? "" }),
  ];
}

export function findingTable(caption, { kinds = false } = {}) {
  const body = h("tbody");
  const names = ["verdict", "check", "measured value and bound", ...(kinds ? ["evidence"] : [])];
  const head = names.map((name) => h("th", { scope: "col", text: name }));
  const table = h("table", { class: "findings" }, h("caption", { class: "unseen", text: caption }),
    h("thead", {}, h("tr", {}, head)), body);
  const rows = [];
  const remedies = new Set();
  return {
    root: h("div", { class: "scroll-x", tabindex: 0, role: "region", "aria-label": caption }, table),
    rows,
    add(finding) {
      rows.push(finding);
      const remedy = finding.verdict === "fail" && !remedies.has(finding.remedy) && finding.remedy;
      if (remedy) remedies.add(remedy);
      body.append(h("tr", { dataset: { verdict: finding.verdict } }, cells(finding, kinds, remedy)));
    },
    hideRemedy(remedy) {
      remedies.add(remedy);
      for (const one of body.querySelectorAll(".finding-remedy")) if (one.dataset.remedy === remedy) one.remove();
    },
    failsFirst() {
      body.prepend(...body.querySelectorAll('tr[data-verdict="fail"]'));
    },
    clear() {
      rows.length = 0;
      remedies.clear();
      body.replaceChildren();
    },
  };
}
