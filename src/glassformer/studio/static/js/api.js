/* Talking to the server. Paths are given without "/api/": post("tokens", {...}).
 *
 *   get(path, {signal})               JSON
 *   post(path, body, {signal})        JSON
 *   postTensor(path, body, {signal})  tensors (wire.js): {tensors, meta};  getTensor(path, {signal}) likewise
 *   events(path, {body, signal, last})   async iterator over Server-Sent Events: {event, data, id}; POST when a body
 *                                     is given. Leaving the loop or aborting closes the connection and ends the work
 *   upload(path, file, {signal})      JSON; the file's text as text/plain
 *   url(path)                         an address for <img src>
 *   ApiError                          .message is the server's sentence, .status its code
 *   aborted(error)                    true for a request that we ended ourselves
 *
 * While torch is still loading (503 with loading: true) a request waits and is repeated; "glass-loading" on document
 * tells {loading: bool}. A busy server (429) is asked again after its Retry-After, a few times.
 */
import { decode } from "./wire.js";

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const aborted = (error) => error?.name === "AbortError";

/* A token given in the address (--token) is in a cookie by now; it leaves the address bar. */
const address = new URL(location.href);
if (address.searchParams.has("token")) {
  address.searchParams.delete("token");
  history.replaceState(null, "", address);
}

const BUSY_TRIES = 4;
const LOADING_TRIES = 400; // of 300 ms: two minutes for torch
let loading = false;

function tellLoading(now) {
  if (now === loading) return;
  loading = now;
  document.dispatchEvent(new CustomEvent("glass-loading", { detail: { loading } }));
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const stop = () => (clearTimeout(timer), reject(new DOMException("left", "AbortError")));
    const timer = setTimeout(() => (signal?.removeEventListener("abort", stop), resolve()), ms);
    signal?.addEventListener("abort", stop, { once: true });
  });
}

async function refusal(response) {
  const text = await response.text();
  try {
    const answer = JSON.parse(text);
    return { message: answer.error?.message ?? answer.error ?? text, loading: answer.loading === true };
  } catch {
    return { message: text || `the server answered ${response.status}.`, loading: false };
  }
}

async function request(path, { method = "GET", body, type = "application/json", accept, signal, headers = {} } = {}) {
  const sent = { ...headers };
  if (body !== undefined) sent["Content-Type"] = type;
  if (accept) sent.Accept = accept;
  for (let busy = 0, waited = 0; ; ) {
    let response;
    try {
      response = await fetch(`/api/${path}`, { method, body, signal, headers: sent });
    } catch (error) {
      if (aborted(error)) throw error;
      throw new ApiError("the server does not answer: is glass serve still running?", 0);
    }
    if (response.ok) {
      tellLoading(false);
      return response;
    }
    const problem = await refusal(response);
    if (response.status === 503 && problem.loading && ++waited < LOADING_TRIES) {
      tellLoading(true);
      await pause(300, signal);
    } else if (response.status === 429 && ++busy < BUSY_TRIES) {
      await pause(1000 * Math.min(5, Number(response.headers.get("Retry-After")) || 1), signal);
    } else throw new ApiError(problem.message, response.status);
  }
}

const asBody = (body) => ({ method: "POST", body: JSON.stringify(body) });

export async function get(path, { signal } = {}) {
  return (await request(path, { signal })).json();
}

export async function post(path, body, { signal } = {}) {
  return (await request(path, { ...asBody(body), signal })).json();
}

const TENSOR = "application/x-glass";

export async function postTensor(path, body, { signal } = {}) {
  return decode(await (await request(path, { ...asBody(body), signal, accept: TENSOR })).arrayBuffer());
}

export async function getTensor(path, { signal } = {}) {
  return decode(await (await request(path, { signal, accept: TENSOR })).arrayBuffer());
}

export async function upload(path, file, { signal } = {}) {
  return (await request(path, { method: "POST", body: file, type: "text/plain", signal })).json();
}

export async function text(path, { signal } = {}) {
  return (await request(path, { signal })).text();
}

export const url = (path) => `/api/${path}`;

function parseEvent(block) {
  const found = { event: "message", id: null, data: null };
  const data = [];
  for (const line of block.split("\n")) {
    const at = line.indexOf(":");
    if (at <= 0) continue; // a comment, or an empty line
    const value = line.slice(at + 1).replace(/^ /, "");
    const name = line.slice(0, at);
    if (name === "data") data.push(value);
    else if (name in found) found[name] = value;
  }
  if (!data.length) return null;
  found.data = JSON.parse(data.join("\n"));
  return found;
}

export async function* events(path, { body, signal, last } = {}) {
  const leave = new AbortController();
  const stop = () => leave.abort();
  signal?.addEventListener("abort", stop, { once: true });
  if (signal?.aborted) stop();
  try {
    const headers = last === undefined || last === null ? {} : { "Last-Event-ID": String(last) };
    const how = body === undefined ? {} : asBody(body);
    const response = await request(path, { ...how, accept: "text/event-stream", signal: leave.signal, headers });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      held = (held + value).replace(/\r\n?/g, "\n");
      const blocks = held.split("\n\n");
      held = blocks.pop();
      for (const block of blocks) {
        const one = parseEvent(block);
        if (one?.event === "error") throw new ApiError(one.data?.error ?? String(one.data), 200);
        if (one) yield one;
      }
    }
  } finally {
    signal?.removeEventListener("abort", stop);
    leave.abort();
  }
}
