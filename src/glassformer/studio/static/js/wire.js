/* Tensors on the wire (application/x-glass): "GLAS", uint32 header length, JSON header, payload; all little-endian.
 *
 *   decode(buffer) -> {tensors: {name: Tensor}, meta}
 *   Tensor: name, shape, dtype, low, high, data (Uint8Array for u8, Float32Array for f32 and f16, Int32Array for i32)
 *     .at(i, j, ...)   one value, u8 already mapped to low..high
 *     .part(i, ...)    the sub-tensor at the first indices, sharing memory
 *     .floats()        all values as a Float32Array
 */

export class Tensor {
  constructor(name, dtype, shape, data, low = 0, high = 1) {
    Object.assign(this, { name, dtype, shape, data, low, high });
  }

  get size() {
    return this.shape.reduce((a, b) => a * b, 1);
  }

  #value(i) {
    return this.dtype === "u8" ? this.low + ((this.high - this.low) * this.data[i]) / 255 : this.data[i];
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
    return this.dtype === "u8" ? Float32Array.from(this.data, (_, i) => this.#value(i)) : Float32Array.from(this.data);
  }
}

let halves = null;

/* All 65,536 float16 numbers: s·2^(e-15)·(1+f/1024), subnormal s·2^-14·f/1024, e = 31 infinite or not a number. */
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

const ARRAYS = { u8: Uint8Array, f16: Uint16Array, f32: Float32Array, i32: Int32Array };

export function decode(buffer) {
  if (buffer.byteLength < 8 || new TextDecoder().decode(new Uint8Array(buffer, 0, 4)) !== "GLAS")
    throw new Error("the server's answer is not a tensor file: reload the page.");
  const length = new DataView(buffer).getUint32(4, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const start = 8 + length;
  const tensors = {};
  for (const { name, dtype, shape, offset, low, high } of header.tensors) {
    const size = shape.reduce((a, b) => a * b, 1);
    const from = start + offset;
    const aligned = from % ARRAYS[dtype].BYTES_PER_ELEMENT === 0;
    const raw = aligned
      ? new ARRAYS[dtype](buffer, from, size)
      : new ARRAYS[dtype](buffer.slice(from, from + size * ARRAYS[dtype].BYTES_PER_ELEMENT));
    tensors[name] = new Tensor(name, dtype, shape, dtype === "f16" ? halfToFloat(raw) : raw, low ?? 0, high ?? 1);
  }
  return { tensors, meta: header.meta ?? {} };
}
