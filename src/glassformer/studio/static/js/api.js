/* Talking to the server. Paths are given without "/api/": post("tokens", {...}).
 *
 *   get(path, {signal})               JSON
 *   post(path, body, {signal})        JSON
 *   postTensor(path, body, {signal})  tensors (tensors.js): {tensors, meta};  getTensor(path, {signal}) likewise
 *   events(path, {body, signal, last})   async iterator over Server-Sent Events: {event, data, id}; POST when a body
 *                                     is given. Leaving the loop or aborting closes the connection and ends the work
 *   upload(path, file, {signal})      JSON; the file's text as text/plain
 *   url(path)                         an address for <img src>
 *   ApiError                          .message is the server's sentence, .status its code
 *   aborted(error)                    true for a request that we ended ourselves
 *
 *   warm()                            the page is drawn: the server may load its engine now
 *
 * While torch is still loading the server says so (202 with loading: true, as we prefer); then the state alone is asked
 * until it is there, and the request is repeated. "glass-loading" on document tells {loading: bool}. A busy server
 * (429) is asked again after its Retry-After, a few times.
 */
import { decode } from "./tensors.js";

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
const LOADING_TRIES = 480; // of 250 ms: two minutes for torch
const tellLoading = (loading) => document.dispatchEvent(new CustomEvent("glass-loading", { detail: { loading } }));
let coming = null;

/* One poll for all who wait. */
function engine() {
  coming ??= (async () => {
    tellLoading(true);
    try {
      for (let tries = 0; tries < LOADING_TRIES; tries++) {
        await pause(250);
        if ((await get("state")).torch !== "loading") return;
      }
      throw new ApiError("the engine did not load within two minutes: see the terminal of glass serve.", 503);
    } finally {
      coming = null;
      tellLoading(false);
    }
  })();
  return coming;
}

/* What comes of a promise, or the end of those who wait for it. */
function unless(signal, promise) {
  if (!signal) return promise;
  return Promise.race([promise, new Promise((_, reject) => {
    const stop = () => reject(new DOMException("left", "AbortError"));
    if (signal.aborted) stop();
    else signal.addEventListener("abort", stop, { once: true });
  })]);
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
    return answer.error?.message ?? answer.error ?? text;
  } catch {
    return text || `the server answered ${response.status}.`;
  }
}

async function request(path, { method = "GET", body, type = "application/json", accept, signal, headers = {} } = {}) {
  const sent = { Prefer: "respond-async", ...headers };
  if (body !== undefined) sent["Content-Type"] = type;
  if (accept) sent.Accept = accept;
  for (let busy = 0; ; ) {
    let response;
    try {
      response = await fetch(`/api/${path}`, { method, body, signal, headers: sent });
    } catch (error) {
      if (aborted(error)) throw error;
      throw new ApiError("the server does not answer: is glass serve still running?", 0);
    }
    if (response.status === 202) await unless(signal, engine());
    else if (response.ok) return response;
    else if (response.status === 429 && ++busy < BUSY_TRIES)
      await pause(1000 * Math.min(5, Number(response.headers.get("Retry-After")) || 1), signal);
    else throw new ApiError(await refusal(response), response.status);
  }
}

const asBody = (body) => ({ method: "POST", body: JSON.stringify(body) });

export async function get(path, { signal } = {}) {
  return (await request(path, { signal })).json();
}

export async function post(path, body, { signal } = {}) {
  return (await request(path, { ...asBody(body), signal })).json();
}

const TENSOR = "application/octet-stream";

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

let warmed = false;

export function warm() {
  if (warmed) return;
  warmed = true;
  // while it loads it is waited for, so that what only the engine can read (a Hugging Face folder) is then read
  post("warm", {}).then(({ torch }) => torch === "loading" && engine()).catch(() => (warmed = false));
}

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
