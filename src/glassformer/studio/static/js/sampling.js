/* From logits to the next-token distribution, as in glassformer.generation.sampling: temperature, top-k, top-p, min-p,
 * each applied to the renormalised result of the one before. The server sends the logits once; sliders only redraw.
 *
 *   ordered(logits)                       ids sorted by descending logit, ties by the lowest id
 *   distribution(logits, order, {temperature, top_k, top_p, min_p}) -> {p: Float64Array, kept, entropy}
 */

export function ordered(logits) {
  const order = Uint32Array.from(logits, (_, id) => id);
  return order.sort((a, b) => logits[b] - logits[a] || a - b);
}

/* Softmax of the first `many` tokens of the order, at this temperature. */
function softmax(logits, order, many, temperature) {
  const p = new Float64Array(many);
  const top = logits[order[0]] / temperature;
  let total = 0;
  for (let i = 0; i < many; i++) total += p[i] = Math.exp(logits[order[i]] / temperature - top);
  for (let i = 0; i < many; i++) p[i] /= total;
  return p;
}

export function distribution(logits, order, { temperature = 1, top_k = null, top_p = 1, min_p = 0 } = {}) {
  const p = new Float64Array(logits.length);
  if (temperature === 0) {
    p[order[0]] = 1;
    return { p, kept: 1, entropy: 0 };
  }
  let many = logits.length;
  if (top_k && top_k < many) { // null and 0 keep all tokens
    const least = logits[order[top_k - 1]];
    many = top_k;
    while (many < logits.length && logits[order[many]] === least) many++; // keep ties with the k-th
  }
  let inOrder = softmax(logits, order, many, temperature);
  if (top_p < 1) {
    let before = 0;
    let i = 0;
    while (i < many && before < top_p) before += inOrder[i++];
    many = i;
    inOrder = softmax(logits, order, many, temperature);
  }
  if (min_p > 0) {
    let i = 1;
    while (i < many && inOrder[i] >= min_p * inOrder[0]) i++;
    if (i < many) inOrder = softmax(logits, order, (many = i), temperature);
  }
  let entropy = 0;
  for (let i = 0; i < many; i++) {
    p[order[i]] = inOrder[i];
    if (inOrder[i] > 0) entropy -= inOrder[i] * Math.log(inOrder[i]);
  }
  return { p, kept: many, entropy };
}
