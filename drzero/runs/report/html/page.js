// The page's own part: draws the charts, filters and sorts the table, opens a row. State is in the address (#…),
// so a reload, and a live page makes one, shows the same again. All text is set as text; the HTML of a
// conversation was escaped when it was made, and the page's policy runs no script in it.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const state = new URLSearchParams(location.hash.slice(1));
const PAGE = 50;
const sourceAt = data.columns.length;
let shown = data.rows.map((_, place) => place);
let first = 0;

function keep(key, value) {
  if (value === "" || value === null) state.delete(key); else state.set(key, value);
  history.replaceState(null, "", "#" + state);
}

// Charts. `ast` has Vega interpret its expressions: nothing is compiled from text. A folded one has no width,
// so it is drawn when its fold opens.
const draw = ([name, spec]) => vegaEmbed("#chart-" + name, spec, { actions: false, renderer: "svg", ast: true })
  .then(({ view }) => view.addEventListener("click", (_, item) => {
    const { since, step } = (item && item.datum) ?? {};
    const field = document.querySelector('#filters input[name="step"]');
    if (step === undefined || !field) return;
    field.value = since < step ? `${since}..${step}` : step;
    field.dispatchEvent(new Event("input", { bubbles: true }));
    byId("trajectories").scrollIntoView();
  }));
let waiting = Object.entries(data.charts);
function drawShown() {
  const isFolded = ([name]) => byId("chart-" + name).closest("details:not([open])");
  const shown = waiting.filter((chart) => !isFolded(chart));
  waiting = waiting.filter(isFolded);
  return Promise.all(shown.map(draw)).then(() => { document.body.dataset.drawn = shown.length; });
}
document.addEventListener("toggle", drawShown, true);
drawShown();

// Conversations, unpacked when asked for; the last pack is kept.
let last = [null, null];
async function pack(number) {
  if (last[0] !== number) {
    const text = document.getElementsByClassName("pack")[number].textContent;
    const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    last = [number, await new Response(stream).json()];
  }
  return last[1];
}

// A number column takes 3, >0.5, <=1 and 1..3; any other its part of the text.
function matcher(text) {
  const range = text.match(/^(-?[\d.]+)\.\.(-?[\d.]+)$/);
  const bound = text.match(/^(<=|>=|<|>|=)?\s*(-?\d+(?:\.\d+)?)$/);
  const number = (test) => (cell) => cell !== null && test(Number(cell));
  if (range) return number((cell) => cell >= Number(range[1]) && cell <= Number(range[2]));
  if (!bound) return (cell) => String(cell ?? "").toLowerCase().includes(text.toLowerCase());
  const limit = Number(bound[2]);
  const tests = { "<": (c) => c < limit, "<=": (c) => c <= limit, ">": (c) => c > limit, ">=": (c) => c >= limit };
  const numeric = number(tests[bound[1]] ?? ((c) => c === limit));
  return (cell) => typeof cell === "string" ? cell.includes(text) : numeric(cell);
}

let round = 0;
async function filter() {
  const mine = ++round;
  const tests = data.columns.map((name, place) => [place, state.get(name)]).filter(([, text]) => text)
    .map(([place, text]) => [place, matcher(text)]);
  let found = data.rows.map((_, place) => place)
    .filter((row) => tests.every(([place, test]) => test(data.rows[row][place])));
  const text = state.get("text");
  if (text) found = await containing(found, text.toLowerCase(), () => mine !== round);
  if (mine !== round) return;
  const sort = state.get("sort");
  const column = data.columns.indexOf(sort && sort.replace(/^-/, ""));
  if (column >= 0) {
    const sign = sort.startsWith("-") ? -1 : 1;
    found.sort((a, b) => {
      const [one, two] = [data.rows[a][column], data.rows[b][column]];
      if (one === null || two === null) return (one === null) - (two === null);
      return sign * (typeof one === "string" ? one.localeCompare(two) : one - two);
    });
  }
  shown = found;
  first = Math.min(first, Math.max(0, Math.floor((shown.length - 1) / PAGE) * PAGE));
  render();
}

// Searches whole conversations, pack by pack, until the filters change again. Their HTML is ours: a `<` is always
// a tag, and text is escaped in these five ways.
const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", "'": "&#39;", '"': "&#34;" };
async function containing(rows, text, isStale) {
  const escaped = text.replace(/[&<>'"]/g, (char) => ESCAPES[char]);
  const found = [];
  byId("count").textContent = "searching …";
  for (const row of rows) {
    const cells = data.rows[row], place = cells[sourceAt + 2];
    if (isStale()) return [];
    const html = place === null ? "" : (await pack(Math.floor(place / data.pack_size)))[place % data.pack_size];
    if (html.replace(/<[^>]*>/g, "").toLowerCase().includes(escaped) ||
        cells.join(" ").toLowerCase().includes(text)) found.push(row);
  }
  return found;
}

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function render() {
  const body = document.querySelector("#rows tbody");
  const listed = shown.slice(first, first + PAGE);
  const sort = state.get("sort") ?? "", sorted = sort.replace(/^-/, "");
  // A loop's stages fill different columns: one that no listed row fills gives its room to the others.
  const isHidden = data.columns.map((name, place) => name !== sorted && listed.length > 0 &&
    listed.every((row) => (data.rows[row][place] ?? "") === ""));
  body.replaceChildren(...listed.map((row) => {
    const cells = data.rows[row], line = element("tr");
    const opener = element("td");
    if (cells[sourceAt + 2] === null) {
      opener.append(element("a", "file", { href: cells[sourceAt], title: `line ${cells[sourceAt + 1]}` }));
    } else {
      const button = element("button", "open", { type: "button", "aria-label": `open row ${row + 1}` });
      button.addEventListener("click", () => open(row));
      opener.append(button);
    }
    line.append(opener, ...data.columns.map((name, place) => element("td", cells[place] ?? "", {
      "data-column": name, "data-label": name.replace("_", " "), ...(typeof cells[place] === "number" ? { class: "number" } : { dir: "auto" }),
      ...(isHidden[place] ? { hidden: "" } : {}),
    })));
    return line;
  }));
  byId("count").textContent = `${shown.length} of ${data.rows.length} rows`;
  byId("place").textContent = shown.length ? `${first + 1} to ${Math.min(first + PAGE, shown.length)}` : "none";
  byId("previous").disabled = first === 0;
  byId("next").disabled = first + PAGE >= shown.length;
  document.querySelectorAll("#rows th[data-column]").forEach((head, place) => {
    const is = sorted === head.dataset.column;
    head.hidden = isHidden[place];
    head.setAttribute("aria-sort", is ? (sort.startsWith("-") ? "descending" : "ascending") : "none");
  });
}

async function open(row) {
  const place = data.rows[row][sourceAt + 2];
  if (place === null) return;
  byId("body").innerHTML = (await pack(Math.floor(place / data.pack_size)))[place % data.pack_size];
  keep("open", row);
  if (!byId("one").open) byId("one").showModal();
  byId("one").scrollTop = 0;
}

function move(by) {
  const place = shown.indexOf(Number(state.get("open"))) + by;
  if (place >= 0 && place < shown.length) open(shown[place]);
}

function build() {
  const form = byId("filters");
  const field = (place, name, label, kind) => {
    const holder = element("label", label, { class: kind });
    const input = element("input", undefined, { name, type: "search", autocomplete: "off" });
    input.value = state.get(name) ?? "";
    input.addEventListener("input", () => { keep(name, input.value.trim()); first = 0; filter(); });
    holder.append(input);
    place.append(holder);
  };
  field(form, "text", "anywhere in the conversation", "text");
  const columns = element("details");
  columns.open = innerWidth > 700 || data.columns.some((name) => state.has(name));
  columns.append(element("summary", "by column"));
  data.columns.forEach((name) => field(columns, name, name.replace("_", " "), "cell"));
  form.append(columns);
  form.addEventListener("submit", (event) => event.preventDefault());
  const head = document.querySelector("#rows thead tr");
  head.append(element("th", ""));
  data.columns.forEach((name, place) => {
    const isNumber = data.rows.every((cells) => typeof cells[place] !== "string");
    const cell = element("th", undefined, { "data-column": name, scope: "col", class: isNumber ? "number" : "" });
    const button = element("button", name.replace("_", " "), { type: "button" });
    button.addEventListener("click", () => { keep("sort", state.get("sort") === name ? "-" + name : name); filter(); });
    cell.append(button);
    head.append(cell);
  });
  byId("previous").addEventListener("click", () => { first -= PAGE; render(); });
  byId("next").addEventListener("click", () => { first += PAGE; render(); });
  byId("before").addEventListener("click", () => move(-1));
  byId("after").addEventListener("click", () => move(1));
  byId("close").addEventListener("click", () => byId("one").close());
  byId("one").addEventListener("close", () => keep("open", null));
  byId("one").addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft") move(-1);
    if (event.key === "ArrowRight") move(1);
  });
  filter();
}

if (byId("filters")) build();

// A link to a row (#open=7), and one into a fold.
function follow() {
  const row = Number(new URLSearchParams(location.hash.slice(1)).get("open") ?? NaN);
  if (data.rows[row]) open(row);
  const fold = document.querySelector("details.fold:target");
  if (fold) fold.open = true;
}
addEventListener("hashchange", follow);
follow();

// From a file, some browsers have no clipboard: the command is then selected, ready for a key.
document.querySelectorAll("button.copy").forEach((button) => button.addEventListener("click", async () => {
  const text = button.previousElementSibling;
  getSelection().selectAllChildren(text);
  const said = await Promise.resolve(navigator.clipboard?.writeText(text.textContent)).then(
    () => navigator.clipboard || document.execCommand("copy"), () => document.execCommand("copy"));
  button.textContent = said ? "copied" : "press Ctrl-C";
}));
if (data.version !== null) {
  setInterval(async () => {
    if (byId("one").open) return;  // it is being read
    const answer = await fetch("version").catch(() => null);
    if (answer && answer.ok && (await answer.text()) !== data.version) location.reload();
  }, 5000);
}
