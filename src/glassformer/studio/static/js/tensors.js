/* Tensors from the server, in the safetensors format: uint64 header length, JSON header, data; all little-endian.
 *
 *   decode(buffer) -> {tensors: {name: Tensor}, meta}
 *   Tensor: name, shape, dtype, low, high, data (Uint8Array for U8, Float32Array for F32 and F16, Int32Array for I32)
 *     .at(i, j, ...)   one value; U8 is mapped to low..high
 *     .part(i, ...)    the sub-tensor at the first indices, sharing memory
 *     .floats()        all values as a Float32Array
 *
 * `__metadata__` has two JSON strings: `meta`, and `ranges` with [low, high] of each tensor (see encoding.py).
 */

export class Tensor {
  constructor(name, dtype, shape, data, low = 0, high = 1) {
    Object.assign(this, { name, dtype, shape, data, low, high });
  }

  get size() {
    return this.shape.reduce((a, b) => a * b, 1);
  }

  #value(i) {
    return this.dtype === "U8" ? this.low + ((this.high - this.low) * this.data[i]) / 255 : this.data[i];
  }

  at(...index) {
    return this.#value(index.reduce((offset, i, axis) => offset * this.shape[axis] + i, 0));
  }

  part(...index) {
    const rest = this.shape.slice(index.length);
    const size = rest.reduce((a, b) => a * b, 1);
    const start = size * index.reduce((offset, i, axis) => offset * this.shape[axis] + i, 0);
    return new Tensor(this.name, this.dtype, rest, this.data.subarray(start, start + size), this.low, this.high);
  }

  floats() {
    return this.dtype === "U8" ? Float32Array.from(this.data, (_, i) => this.#value(i)) : Float32Array.from(this.data);
  }
}

let halves = null;

/* All 65,536 float16 numbers: s·2^(e-15)·(1+f/1024), subnormal s·2^-14·f/1024, e = 31 infinite or NaN. */
function halfTable() {
  const table = new Float32Array(65536);
  for (let bits = 0; bits < 65536; bits++) {
    const sign = bits & 0x8000 ? -1 : 1;
    const exponent = (bits >> 10) & 31;
    const fraction = (bits & 1023) / 1024;
    if (exponent === 31) table[bits] = fraction ? NaN : sign * Infinity;
    else table[bits] = sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction) : 2 ** -14 * fraction);
  }
  return table;
}

function halfToFloat(words) {
  halves ??= halfTable();
  const out = new Float32Array(words.length);
  for (let i = 0; i < words.length; i++) out[i] = halves[words[i]];
  return out;
}

const ARRAYS = { U8: Uint8Array, F16: Uint16Array, F32: Float32Array, I32: Int32Array };

export function decode(buffer) {
  const length = buffer.byteLength < 8 ? NaN : Number(new DataView(buffer).getBigUint64(0, true));
  if (!(length <= buffer.byteLength - 8)) throw new Error("the response is not a safetensors file: reload the page.");
  const { __metadata__, ...entries } = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const ranges = JSON.parse(__metadata__.ranges);
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets: [from, to] }] of Object.entries(entries)) {
    const kind = ARRAYS[dtype];
    const start = 8 + length + from;
    const size = (to - from) / kind.BYTES_PER_ELEMENT;
    const aligned = start % kind.BYTES_PER_ELEMENT === 0; // a typed array cannot start elsewhere: copy the bytes then
    const raw = aligned ? new kind(buffer, start, size) : new kind(buffer.slice(start, start + to - from));
    tensors[name] = new Tensor(name, dtype, shape, dtype === "F16" ? halfToFloat(raw) : raw, ...ranges[name]);
  }
  return { tensors, meta: JSON.parse(__metadata__.meta) };
}
