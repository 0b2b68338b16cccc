// Calls of the server's HTTP API: the token, errors as exceptions, server-sent events.

const TOKEN = "sonant.token";

/** An error of the server, with the fields of its body, or of the connection (status 0). */
export class ApiError extends Error {
  constructor(status, error = {}) {
    super(error.message || `The server answered with status ${status}.`);
    this.status = status;
    this.param = error.param ?? null;
    this.code = error.code ?? null;
  }
}

/** Keep a token for this tab; an empty one is forgotten. */
export function setToken(token) {
  if (token) sessionStorage.setItem(TOKEN, token);
  else sessionStorage.removeItem(TOKEN);
}

/** Send a request, with a JSON body if there is one; return the response. Throws ApiError. */
export async function call(path, { body, signal } = {}) {
  const headers = {};
  const token = sessionStorage.getItem(TOKEN);
  if (token) headers.authorization = `Bearer ${token}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await reach(() =>
    fetch(path, {
      method: body === undefined ? "GET" : "POST",
      body: body === undefined ? undefined : JSON.stringify(body),
      headers,
      signal,
    }),
  );
  if (response.ok) return response;
  let error;
  try {
    error = (await response.json()).error;
  } catch {
    error = {};
  }
  const wait = response.headers.get("retry-after");
  if (wait && error?.message) error.message += ` (try again in ${wait} s)`;
  throw new ApiError(response.status, error);
}

/** Yield the JSON of each server-sent event. Throws ApiError for an event that is an error. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reach(() => reader.read());
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(response.status, event.error);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Run a network operation; failures other than a cancellation become ApiError. */
async function reach(operation) {
  try {
    return await operation();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The server cannot be reached, or the connection was lost." });
  }
}
