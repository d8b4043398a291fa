/* The site's search, in the place of Zensical's, which finds a section only if every word of a phrase is in it. lunr ranks
   the sections by the words they have. The messages are those of Zensical's worker: 0 brings the site's sections, 1 says
   that they are indexed, 2 brings what a reader typed, 3 takes the results. */
importScripts("lunr.js");

// What newcomers type, and what the pages say.
const SAME = {
  budget: "cost", cancel: "stop", cheap: "cost", chart: "curves", continue: "resume", crash: "dies", crashed: "dies",
  data: "documents", dollars: "cost", exit: "ends", expensive: "cost", freezes: "hangs", frozen: "hangs", interrupt: "stop", licence: "license",
  llm: "model", mac: "laptop", oom: "memory", pay: "cost", pdf: "documents", price: "cost", pricing: "cost",
  quick: "install", quickstart: "install", restart: "resume", ram: "memory", rent: "modal", setup: "install", stuck: "hangs", ui: "page",
  vram: "memory", windows: "linux",
};
const SHOWN = 30;
const TAGS_AND_WORDS = /<[^>]*>|[\p{L}\p{N}]+/gu;

let sections = [];
let index = null;

// A newcomer wants a page's start before its details, and the guides before keys, tests and measurements.
function weight(section) {
  const [room, page] = section.path;
  const reference = room === "Project" || (room === "Reference" && page !== "Questions");
  return (reference ? 0.5 : 1) * (section.level === 1 ? 1.25 : 1);
}

function read(items) {
  sections = items;
  index = lunr(function () {
    this.pipeline.remove(lunr.stopWordFilter); // "no GPU" is not "GPU"
    this.b(0.5); // a short title says less of a page than lunr takes it to
    this.field("title", { boost: 5 });
    this.field("page", { boost: 2 });
    this.field("text");
    items.forEach((section, id) => {
      const text = section.text.replace(/<[^>]*>/g, " ");
      this.add({ id, title: section.title, page: section.path.at(-1), text }, { boost: weight(section) });
    });
  });
}

function matches(typed) {
  const words = lunr.tokenizer(typed.replace(/&\w+;|[^\p{L}\p{N}]+/gu, " ")).map(String).filter(Boolean);
  if (!words.length) return [];
  const found = index.query(query => {
    for (const word of words) {
      query.term(word, {});
      if (Object.hasOwn(SAME, word)) query.term(SAME[word], { boost: 0.8 });
    }
    // The last word may be unfinished, and any may be misspelt.
    query.term(words.at(-1), { boost: 0.2, usePipeline: false, wildcard: lunr.Query.wildcard.TRAILING });
    for (const word of words.filter(word => word.length > 4)) query.term(word, { boost: 0.1, editDistance: 1 });
  });
  const phrase = words.join(" ");
  for (const one of found) one.score *= nearness(sections[one.ref], phrase);
  return found.sort((one, other) => other.score - one.score);
}

// More for a section with the whole phrase, most of all in its title.
function nearness({ title, text }, phrase) {
  if (!phrase.includes(" ")) return 1;
  const has = words => words.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, " ").includes(phrase);
  return has(title) ? 2 : has(text) ? 1.2 : 1;
}

// Where the words that were found stand in a text with tags, less "how", "it" and the like.
function marks(text, found) {
  const ranges = [];
  for (const { 0: word, index: start } of text.matchAll(TAGS_AND_WORDS)) {
    if (word[0] === "<") continue;
    const stem = lunr.stemmer(new lunr.Token(word.toLowerCase())).toString();
    if (found.has(stem) && lunr.stopWordFilter(word.toLowerCase())) ranges.push({ start, end: start + word.length, value: word.length });
  }
  return ranges;
}

function shown({ ref, score, matchData }) {
  const found = new Set(Object.keys(matchData.metadata));
  const matched = ["title", "text"].map(field => {
    return { id: Number(ref), field, score, value: { highlight: { ranges: marks(sections[ref][field], found) } } };
  });
  return { id: Number(ref), matches: matched };
}

self.onmessage = ({ data: { type, data } }) => {
  if (type === 0) {
    read(data.items);
    self.postMessage({ type: 1 });
  } else if (type === 2) {
    const found = index && typeof data.input === "string" ? matches(data.input) : [];
    const items = found.slice(0, SHOWN).map(shown);
    self.postMessage({ type: 3, data: { items, total: found.length, aggregations: [], pagination: { total: found.length } } });
  }
};
