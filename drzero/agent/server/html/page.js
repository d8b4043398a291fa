
// Asks, and shows what the server's events tell. Text of models and documents enters the page as text only.
"use strict";
const byId = (id) => document.getElementById(id);
const KEPT = 3; // earlier exchanges that the agent reads
const PASSAGES = 3; // with evidence, that are shown under an answer
const STATES = { supported: "good", unsupported: "warn", none: "warn", failed: "bad" };
let talk = []; // [question, answer] of this conversation
let running = null;

// Control characters, and those that reorder text, are shown and not obeyed.
const visible = (text) => String(text).replace(/[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]/g,
  (found) => "\\u" + found.charCodeAt(0).toString(16).padStart(4, "0"));

function make(name, className = "", ...content) {
  const one = document.createElement(name);
  one.className = className;
  one.append(...content.map((part) => part instanceof Node ? part : visible(part)));
  return one;
}

function marked(text, part) {
  const at = part ? text.indexOf(part) : -1;
  return at < 0 ? [text] : [text.slice(0, at), make("mark", "", part), text.slice(at + part.length)];
}

// One model's part of an exchange, which grows with its events.
class Side {
  constructor(named) {
    this.name = make("h3", "", "The second model: asked after the first");
    this.name.hidden = !named;
    this.steps = make("ol", "steps");
    this.waiting = make("li", "waits", "Thinking");
    this.searches = new Map(); // by queries, those that wait for passages
    this.steps.append(this.waiting);
    this.part = make("section", "", this.name, this.steps);
    this.ended = false;
  }

  hear(event) {
    this.name.textContent = visible(event.model);
    if (event.found) this.found(event);
    else if (event.searching) this.searching(event.searching);
    else if (event.answer) this.answered(event);
    else this.end("bad", event.error);
  }

  searching(queries) {
    const words = queries.flatMap((query, place) => [place ? ", " : "", make("b", "", query)]);
    const step = make("li", "waits", "Searching for ", ...words);
    const key = JSON.stringify(queries);
    this.searches.set(key, [...(this.searches.get(key) ?? []), step]);
    this.waiting.hidden = true;
    this.steps.insertBefore(step, this.waiting);
  }

  found({ searching, found }) {
    const step = this.searches.get(JSON.stringify(searching)).shift();
    step.className = "";
    step.firstChild.data = "Searched for ";
    const passages = found.map((source) =>
      make("li", "", make("details", "", make("summary", "", source.title || source.id || "untitled"), make("p", "text", source.text))));
    step.append(passages.length ? make("ul", "passages", ...passages) : make("div", "", "Nothing found"));
    this.waiting.hidden = [...this.searches.values()].some((left) => left.length);
  }

  answered({ model, index, note, answer: { answer, state, sources, searches, seconds, tokens_in, tokens_out } }) {
    if (answer !== null) this.part.append(make("p", answer.length > 160 ? "answer long" : "answer", answer));
    this.end(STATES[state], note + (sources.length ? "" : searches.length ? " Its searches found none." : " It did not search."));
    for (const source of sources.filter((one) => one.evidence).slice(0, PASSAGES)) {
      const inText = source.text.includes(source.evidence);
      const title = make("span", "title", ...(inText ? [source.title || "untitled"] : marked(source.title, source.evidence)));
      this.part.append(make("div", "source", title, " ", make("small", "", source.id),
        make("p", "text", ...marked(source.text, inText ? source.evidence : null))));
    }
    const facts = [model, `index ${index.slice(0, 12)}`, `${seconds.toFixed(1)} s`, `${(tokens_in + tokens_out).toLocaleString("en")} tokens`];
    this.part.append(make("p", "facts", facts.join(" · ")));
  }

  end(className, words) {
    this.ended = true;
    this.waiting.remove();
    for (const step of this.steps.querySelectorAll(".waits")) step.className = "";
    if (!this.steps.children.length) this.steps.remove();
    this.part.append(make("p", `state ${className}`, words));
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
    const whole = (rest + piece.value).split("\n\n");
    rest = whole.pop();
    for (const event of whole) if (event.startsWith("data: ")) yield JSON.parse(event.slice(6));
  }
}

async function post(body, signal) {
  for (let refused = false; ; refused = true) {
    const token = sessionStorage.getItem("token");
    const headers = { "Content-Type": "application/json", ...(token && { Authorization: `Bearer ${token}` }) };
    const response = await fetch("ask", { method: "POST", headers, body, signal });
    if (response.status !== 401) return response;
    await askToken(refused ? "The server did not accept this token." : "");
  }
}

function askToken(why) {
  byId("refused").textContent = why;
  byId("token").value = "";
  byId("door").returnValue = "";
  byId("door").showModal();
  return new Promise((entered, left) => {
    byId("door").onclose = () => byId("door").returnValue === "entered" ? entered() : left(new DOMException("", "AbortError"));
  });
}

async function ask(question) {
  const compare = byId("compare").checked;
  const sides = compare ? [new Side(true), new Side(true)] : [new Side(false)];
  const exchange = make("article", "", make("h2", "", question), make("div", "sides", ...sides.map((side) => side.part)));
  document.body.classList.add("talking");
  document.body.classList.toggle("two", compare || Boolean(document.querySelector(".sides > section + section")));
  byId("talk").append(exchange);
  byId("over").hidden = false;
  byId("question").placeholder = "Ask another question";
  exchange.scrollIntoView();
  let why = ["bad", "The server ended the connection before the answer."];
  try {
    const response = await post(JSON.stringify({ question, earlier: talk.slice(-KEPT), compare }), running.signal);
    if (!response.ok) throw new Error((await response.json().catch(() => ({}))).error?.message ?? `The server answered with status ${response.status}.`);
    for await (const event of events(response)) {
      sides[event.side].hear(event);
      if (event.side === 0 && event.answer) answered(question, event.answer, event.note);
    }
  } catch (error) {
    why = error.name === "AbortError" ? ["dim", "Stopped."] : ["bad", error.name === "TypeError" ? "The server cannot be reached." : error.message];
    byId("question").value ||= question;
  }
  for (const side of sides) if (!side.ended) side.end(...why);
}

function answered(question, { answer, state }, note) {
  if (answer !== null && state !== "failed") talk.push([question, answer]);
  byId("said").textContent = visible(answer === null ? note : `${answer}: ${note}`);
}

async function start() {
  const question = byId("question").value.trim();
  if (running || !question) return;
  running = new AbortController();
  byId("question").value = "";
  setRunning(true);
  try { await ask(question); } finally { running = null; setRunning(false); }
}

function setRunning(isRunning) {
  byId("ask").textContent = isRunning ? "Stop" : "Ask";
  byId("ask").classList.toggle("stop", isRunning);
  byId("talk").setAttribute("aria-busy", isRunning);
}

function startOver() {
  running?.abort();
  talk = [];
  byId("talk").replaceChildren();
  byId("said").textContent = "";
  byId("over").hidden = true;
  byId("question").placeholder = "Ask a question";
  document.body.className = "";
  byId("question").focus();
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort(); else start();
});
byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  start();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
byId("over").addEventListener("click", startOver);
byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", byId("token").value.trim());
  byId("door").close("entered");
});
byId("leave").addEventListener("click", () => byId("door").close(""));
