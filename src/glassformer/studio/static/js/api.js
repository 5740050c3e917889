/* Requests to the server. Paths are given without "/api/": post("tokens", {...}).
 *
 *   get(path, {signal})               JSON
 *   post(path, body, {signal})        JSON
 *   postTensor(path, body, {signal})  tensors (tensors.js): {tensors, meta};  getTensor(path, {signal}) likewise
 *   events(path, {body, signal, last})   async iterator over Server-Sent Events: {event, data, id}; POST when a body
 *                                     is given. Leaving the loop or aborting closes the connection and cancels the job
 *   upload(path, file, {signal})      JSON; the file's text as text/plain
 *   url(path)                         an address for <img src>
 *   ApiError                          .message is the server's error message, .status its HTTP status
 *   aborted(error)                    true for a request that the page itself aborted
 *
 *   warm()                            tell the server that the page is drawn, so that it imports torch
 *
 * While torch is being imported the server responds 202 with loading: true. Then only the state is requested until the
 * import is done, and the request is repeated. The event "glass-loading" on document carries {loading: bool}. If the
 * server is busy (429), the request is repeated after its Retry-After, a few times.
 */
import { decode } from "./tensors.js";

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const aborted = (error) => error?.name === "AbortError";

/* A token in the address (--token) is stored in a cookie by now: remove it from the address bar. */
const address = new URL(location.href);
if (address.searchParams.has("token")) {
  address.searchParams.delete("token");
  history.replaceState(null, "", address);
}

const BUSY_TRIES = 4;
const LOADING_TRIES = 480; // of 250 ms: two minutes for torch
const notifyLoading = (loading) => document.dispatchEvent(new CustomEvent("glass-loading", { detail: { loading } }));
let polling = null;

/* Wait until torch is imported; all waiting requests share one poll. */
function torchReady() {
  polling ??= (async () => {
    notifyLoading(true);
    try {
      for (let tries = 0; tries < LOADING_TRIES; tries++) {
        await pause(250);
        if ((await get("state")).torch !== "loading") return;
      }
      throw new ApiError("torch was not imported within two minutes: see the terminal of glass serve.", 503);
    } finally {
      polling = null;
      notifyLoading(false);
    }
  })();
  return polling;
}

/* The result of a promise, or an AbortError once the signal is aborted. */
function orAborted(signal, promise) {
  if (!signal) return promise;
  return Promise.race([promise, new Promise((_, reject) => {
    const stop = () => reject(new DOMException("aborted", "AbortError"));
    if (signal.aborted) stop();
    else signal.addEventListener("abort", stop, { once: true });
  })]);
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const stop = () => (clearTimeout(timer), reject(new DOMException("aborted", "AbortError")));
    const timer = setTimeout(() => (signal?.removeEventListener("abort", stop), resolve()), ms);
    signal?.addEventListener("abort", stop, { once: true });
  });
}

async function errorMessage(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    return body.error?.message ?? body.error ?? text;
  } catch {
    return text || `the server responded with status ${response.status}.`;
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
      throw new ApiError("the server does not respond: is glass serve still running?", 0);
    }
    if (response.status === 202) await orAborted(signal, torchReady());
    else if (response.ok) return response;
    else if (response.status === 429 && ++busy < BUSY_TRIES)
      await pause(1000 * Math.min(5, Number(response.headers.get("Retry-After")) || 1), signal);
    else throw new ApiError(await errorMessage(response), response.status);
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
  // Wait for the import, so that configs which need torch (Hugging Face folders) are read afterwards.
  post("warm", {}).then(({ torch }) => torch === "loading" && torchReady()).catch(() => (warmed = false));
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
    let buffer = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      buffer = (buffer + value).replace(/\r\n?/g, "\n");
      const blocks = buffer.split("\n\n");
      buffer = blocks.pop();
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
