"""The keys of single stages, each on top of what all stages have."""

from dataclasses import dataclass
from typing import Any

from drzero.recipe.settings.conversations import Prompts, Rollout, Solver
from drzero.recipe.settings.key import CONVERSING, FLOATS, MISSING, TORCH_DEVICE, Number, group, key
from drzero.recipe.settings.retrieval import Chroma, Faiss, Retrieval
from drzero.recipe.settings.run import Compute, Data, Machine, Paths, QuestionFields, Run
from drzero.recipe.settings.watch import Collapse, Flow, FlowTest, Watchdog
from environments.call import FORMS


@dataclass
class Common:
    """Every stage."""

    base_model: str = key(
        MISSING,
        "The model that the loop starts from: a folder or a hub id. The groups of model/ set it.",
        run=True,
        pace=True,
    )
    iteration: int = key(
        1,
        "Iteration of the self-evolution loop; it names the runs and says which weights they start from.",
        low=0,
        run=True,
    )
    hop_ratio: list[int] = key(
        [4, 3, 2, 1],
        "Weights of questions of 1, 2, 3, … hops. They name the file of prompts, which prepare-data writes "
        "and challenger and synthesize read.",
        low=0,
    )
    steps_per_iteration: int = key(50, "Training steps of one iteration.", low=1)
    log_level: str = key(
        "WARNING", "What every component logs.", choices=("DEBUG", "INFO", "WARNING", "ERROR")
    )
    verbose: bool = key(
        False,
        "Whether the console shows all that the parts of a run print, each line behind its part's name; "
        "their logs have it in any case.",
    )
    process_env: dict[str, Any] = key(
        {}, "Environment of every process of a run; the groups hardware/ and debug/ add to it."
    )
    paths: Paths = group(Paths)
    run: Run = group(Run)
    machine: Machine = group(Machine)
    data: Data = group(Data)
    question_fields: QuestionFields = group(QuestionFields)
    prompts: Prompts = group(Prompts)
    rollout: Rollout = group(Rollout)
    solver: Solver = group(Solver)
    index: str = key(
        "chroma",
        "What stores the corpus's index: chroma, or faiss, which opens published indices as they are. The "
        "service is the same.",
        choices=("chroma", "faiss"),
        results=CONVERSING,
    )
    chroma: Chroma = group(Chroma)
    faiss: Faiss = group(Faiss)
    retrieval: Retrieval = group(Retrieval)
    flow: Flow = group(Flow)
    watchdog: Watchdog = group(Watchdog)
    collapse: Collapse = group(Collapse)
    compute: Compute = group(Compute)


_METHODS: dict[str, Any] = {"choices": ("hrpo", "grpo", "environment"), "run": True, "pace": True}
_METHOD_DOC = "What the trainer does with rewards; the group mode/ makes it into a trainer mode."


@dataclass
class Challenger:
    """The challenger stage."""

    method: str = key("hrpo", _METHOD_DOC, results=("challenger",), **_METHODS)
    open_book_check: bool = key(
        False,
        "Whether a question earns difficulty only if the solver, shown what the challenger read, gives the "
        "same answer once and greedily: a wrong label passes for a difficult question else. Search Self-Play "
        "(arXiv 2510.18821) found it needed; worth what the solver's reading is worth (docs/learning.md).",
        results=("challenger",),
        run=True,
    )
    hop_check: bool = key(
        False,
        "Whether a question of two or more hops earns difficulty only if its hops hold: a search that found "
        "passages for each further hop, an answer that is not in the document, and no name that leads to it "
        "in one search. Off in the published method, where a question from the document alone may earn as "
        "much (docs/learning.md).",
        results=("challenger",),
        run=True,
    )
    continue_from: str | None = key(
        "${challenger_run:${paths.checkpoints},${add:${iteration},-1}}",
        "Run folder of the last iteration's challenger, whose last checkpoint (weights, optimizer, position "
        "in the data) the first start resumes from; null starts from base_model. The steps count on.",
    )
    allow_off_policy: bool = key(
        False,
        "HRPO compares questions made by the policy as it is now; an asynchronous mode trains on older ones. "
        "true runs mode=colocate_async or separate_async all the same.",
        results=("challenger",),
    )


@dataclass
class SolverStage:
    """The solver stage."""

    method: str = key("grpo", _METHOD_DOC, results=("solver",), **_METHODS)
    balance_hops: bool = key(
        False,
        "Whether every hop count has the same share of an update. Off in the published method, whose batches "
        "hold enough of each; in a small one the majority decides for all (docs/learning.md).",
        results=("solver",),
        run=True,
    )


_CALL_FORM = (
    "How the model writes tool calls: hermes is JSON between <tool_call> tags, as Qwen writes it; xlam is "
    "one array of calls in JSON, as xLAM writes it."
)


@dataclass
class Environment:
    """The environment that a model is trained or evaluated in, where that is not the search of a corpus."""

    name: str | None = key(
        None,
        "Its name, as env= takes it: one that comes along, of paths.environments, of an installed package, "
        "or verifiers:NAME. null in evaluate asks the benchmarks.",
        run=True,
    )
    options: dict[str, Any] = key(
        {}, "What its load() takes, by name; +environment.options.turns=4 sets one.", run=True
    )
    max_turns: int | None = key(
        None, "Assistant turns of an episode at most; null leaves it to the environment.", low=1, run=True
    )
    call_form: str = key(
        "hermes",
        _CALL_FORM,
        choices=tuple(FORMS),
        run=True,
    )
    filter_groups: bool | None = key(
        None,
        "Whether a group of equal rewards is replaced before the update (algorithm.filter_groups): it "
        "teaches nothing, and costs another group's episodes. null does what the environment asks for.",
    )


@dataclass
class Train:
    """The train stage: GRPO in any environment."""

    method: str = key("environment", _METHOD_DOC, results=("train",), **_METHODS)
    steps: int = key(200, "Training steps.", low=1)
    train_rows: int | None = key(
        None,
        "Rows to train on, chosen by data.seed; null takes all that the environment has.",
        low=1,
        run=True,
    )
    val_rows: int = key(50, "Held-out rows of a validation (trainer.test_freq).", low=1)
    environment: Environment = group(Environment)


@dataclass
class FlowTestStage:
    """The flow-test."""

    method: str = key("grpo", _METHOD_DOC, **_METHODS)
    flow_test: FlowTest = group(FlowTest)


@dataclass
class Indexing:
    """How a corpus is indexed."""

    chunk_tokens: int = key(
        256,
        "Tokens of a chunk as the embedder reads it, prefix and title included; at most what the embedder "
        "reads. A document that is longer becomes several chunks, and a prompt shows one.",
        low=1,
    )
    chunk_overlap: int = key(32, "Tokens at a chunk's end that the next one repeats, at most.", low=0)
    kind: str = key(
        "flat",
        "What an index of FAISS is made as: flat is searched exactly, as in the paper; hnsw is faster on a "
        "CPU and takes more memory; ivfpq takes a sixteenth, is trained on a sample, and finds less.",
        choices=("flat", "hnsw", "ivfpq"),
    )
    workers: int = key(
        1,
        "Processes that embed: one a GPU, or a core each. More than one go through Ray, on the machines of "
        "the cluster that RAY_ADDRESS names, else on this one.",
        low=1,
    )
    embed_only: bool = key(
        False,
        "The corpus is embedded, and no index written: the vectors wait in a folder next to it. The same "
        "command without this writes index and prompts, on another machine of the same disk as well: embed "
        "where a GPU is, build where memory is.",
    )
    writers: int = key(
        2,
        "Shards (chroma.shards) that are inserted at once, each by a process; their memory adds up.",
        low=1,
    )
    device: str | None = key(
        None, "torch device of the embedding model; null is CUDA where there is one.", pattern=TORCH_DEVICE
    )


@dataclass
class SourceFields:
    """Which fields of a table's records are what (.jsonl, .json, .csv, .tsv, .parquet)."""

    text: str | None = key(None, "The text; null is text, else contents with the title on its first line.")
    title: str | None = key(None, "The title; null is title, which a record need not have.")
    id: str | None = key(
        None, "What names the document; null is id, and a hash of title and text where a record has none."
    )


@dataclass
class PrepareData:
    """The prepare-data stage."""

    source: str | None = key(
        None,
        "A corpus to index first: a file, a folder or a glob such as 'docs/**/*.md' of .jsonl, .json, .csv, "
        ".tsv, .parquet, .txt, .md, .html and .rst files (also .gz, .zst and .bz2), a data set of the hub "
        "(OWNER/NAME or hf://datasets/OWNER/NAME/FILE), a Chroma folder or a Chroma server's address. null "
        "uses the index at chroma.path, or faiss.path, as it is. A rerun resumes where it was cut off, and "
        "embeds only documents that are new or have changed.",
    )
    fields: SourceFields = group(SourceFields)
    on_bad: str = key(
        "stop",
        "What happens to records and files of the source that cannot be used: stop refuses the source with "
        "all of them in one list, skip leaves them out and says which.",
        choices=("stop", "skip"),
    )
    source_collection: str | None = key(
        None, "The collection to read, if the source is a Chroma with several."
    )
    replace: bool = key(
        False,
        "Rebuild a collection where fewer than half of its documents are unchanged in the source, or the "
        "embedder or the chunk sizes are others.",
    )
    rows: int = key(
        38400, "Prompts to write; 50 steps of 256 for each of three iterations, by default.", low=1
    )
    heldout_rows: int = key(
        256,
        "Prompts of the held-out split, from documents that no training prompt uses where the corpus is "
        "large enough.",
        low=0,
    )
    hold_out: list[str] = key(
        [],
        "Benchmark files whose documents no prompt shows, so that the challenger does not teach what the "
        "solver is evaluated on; they can still be found by searching. The files name the documents of their "
        "questions in doc_ids, or in extra_info.doc_id.",
    )
    min_document_tokens: int = key(
        24,
        "Tokens that a document (a chunk of it, where it is long) needs to be asked about, title included, "
        "as the embedder counts them. It is found by searching all the same.",
        low=0,
    )
    min_prose: float = key(
        0.15,
        "The least share of a document (of a chunk of it) that stands in sentences, five words in a row, for "
        "it to be asked about: less is code, a table, a list of links or a mere reference. 0 asks about "
        "records of fields, and all else.",
        low=0,
        high=1,
    )
    max_document_tokens: int = key(
        256,
        "Tokens of a document that a prompt shows, as the embedder counts them: where indexing.chunk_tokens "
        "is no larger, a prompt shows each chunk whole.",
        low=1,
    )
    fit_hops: bool = key(
        True,
        "Whether a prompt asks for no more hops than documents lead on from its document (data/links.py); "
        "what the corpus cannot carry is asked with fewer hops. false keeps hop_ratio in any case, as do a "
        "large corpus and one in a script without spaces, whose links are not counted.",
    )
    out_dir: str = key("${paths.corpus}/data", "Where the prompts go.")
    indexing: Indexing = group(Indexing)


_WITH_ENDPOINT = ("synthesize", "evaluate", "preview")
_ENDPOINT_MODEL = "Which of the endpoint's models; null takes the only one it has."
_ENDPOINT = (
    "Address of an OpenAI-compatible server that already serves the model, such as "
    "http://127.0.0.1:8001/v1; null starts a server for it here. synthesize and preview converse over its "
    "chat completions with tool calls; evaluate over its completions from token ids, with tokenizer=. What "
    "it said is kept by address and model name: a server that has moved to another address needs another "
    "run.name."
)


@dataclass
class Endpoint:
    """A server in place of one of our own."""

    endpoint: str | None = key(None, _ENDPOINT, results=_WITH_ENDPOINT)
    endpoint_model: str | None = key(None, _ENDPOINT_MODEL, results=_WITH_ENDPOINT)
    endpoint_key: str = key(
        "OPENAI_API_KEY",
        "The environment variable that has the endpoint's key, which is written nowhere and sent to no other "
        "server; an endpoint that asks for none needs none.",
        pattern=(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable"),
    )


@dataclass
class ChatEndpoint(Endpoint):
    """One that is conversed with in messages, and counts the tokens."""

    usd_per_million_in: int | float | None = key(
        None, "US dollars that the endpoint takes for a million tokens read, to report the cost.", low=0
    )
    usd_per_million_out: int | float | None = key(None, "The same for a million tokens written.", low=0)


@dataclass
class Comparison:
    """What compare-rollouts asks of an engine and of Transformers, and what it lets pass.

    A limit that is null is that of the numbers the engine computes with (solver.dtype): float32 adds up to
    1e-5, bfloat16 has three digits.
    """

    data: str = key(
        "${data.train_files}",
        "The prompts (data=): a stage's parquet file, or questions as evaluate reads them. Each is scored as "
        "its stage scores it.",
    )
    n: int | None = key(
        None, "Prompts of it (n=), chosen by data.seed; null takes 64, on a CPU 8.", low=1, high=10_000
    )
    tokens: int = key(
        "${rollout.max_tokens_per_turn}", "Tokens that each prompt is continued by, at most.", low=1
    )
    draws: int = key(
        100, "Draws of one token at each place where the sampler is tested, for each setting.", low=50
    )
    places: int = key(3, "Such places, each after another prompt.", low=1)
    dtype: str = key(
        "float32",
        "Numbers that Transformers computes with: float32 leaves all rounding to the engine; bfloat16 for a "
        "model that does not fit the memory otherwise, with limits of bfloat16.",
        choices=FLOATS,
    )
    tie_nats: int | float | None = key(
        None,
        "Two tokens no further apart are a tie, which rounding decides; null is 0.001, in 16 bits 0.25.",
        low=0,
    )
    mean_gap_nats: int | float | None = key(
        None,
        "Between the log-probabilities of the engine's sampled tokens on both sides, on average; null is "
        "0.0001, in 16 bits 0.02: the demo policy in bfloat16 is 0.0025 off.",
        low=0,
    )
    largest_gap_nats: int | float | None = key(
        None, "The same of a single token; null is 0.005, in 16 bits 1.", low=0
    )
    differing_share: Number = key(
        0,
        "Share of greedy sequences that may differ other than by a tie. A single one is a fault.",
        low=0,
        high=1,
    )
    score_gap: Number = key(
        0.05,
        "Between the mean scores of both sides' greedy turns: what ties alone may cost.",
        low=0,
        high=1,
    )
    least_p: Number = key(
        1e-5,
        "Of the tests of the sampler's frequencies: of some dozen of them a right sampler fails one in ten "
        "thousand comparisons.",
        above=0,
        high=0.05,
    )


@dataclass
class CompareRollouts:
    """The comparison of an engine with Transformers."""

    endpoint: str | None = key(
        None,
        "Address of a server that serves the model: SGLang, vLLM or the reference engine; null starts the "
        "one of rollout= here. The limits are then those of solver.dtype: set it to what the server computes "
        "with.",
    )
    endpoint_model: str | None = key(None, _ENDPOINT_MODEL)
    compare: Comparison = group(Comparison)


_SYNTHESIZE: dict[str, Any] = {"results": ("synthesize",)}


@dataclass
class Gates:
    """What a pair has to pass before the solver sees it (data/gates.py).

    bench/gates.py measures what each one catches. With other gates a rerun judges the same samples, without
    new conversations.
    """

    evidence: bool = key(True, "The answer stands in the document or in what was retrieved.", **_SYNTHESIZE)
    hops: bool = key(
        True,
        "A question of h hops took h - 1 turns that found passages with a new query, and its answer does not "
        "stand in the document that it starts from.",
        **_SYNTHESIZE,
    )
    integrity: bool = key(
        True,
        "The question asks once, in at most 50 words, for something that it names; it does not give its "
        "answer away, not in disguise either, and shows nothing of the prompt's template; the answer is "
        "short.",
        **_SYNTHESIZE,
    )
    max_answer_words: int = key(
        10, "Words of an answer; the format score gives longer ones nothing.", low=1, **_SYNTHESIZE
    )
    duplicates: bool = key(True, "No accepted question has the same words.", **_SYNTHESIZE)
    near_duplicates: bool = key(
        True,
        "No accepted question with the same answer or about the same document asks the same in other words, "
        "by the embedder that the run searches with.",
        **_SYNTHESIZE,
    )
    near_duplicate_cosine: int | float | None = key(
        None,
        "Cosine from which two questions are the same one; half as far from 1 if their answers have no word "
        "in common. null measures it for the embedder on the demo world, where it is known which are.",
        above=0,
        high=1,
        **_SYNTHESIZE,
    )
    contamination: bool = key(
        True, "No run of words and no fact shared with a benchmark question.", **_SYNTHESIZE
    )
    contamination_ngram: int = key(8, "Words in a row that count as shared.", low=2, **_SYNTHESIZE)
    benchmarks: list[str] = key(
        [],
        "Benchmark files for that gate, as `evaluate` reads them; without one it judges "
        "nothing, and the report says so.",
    )
    pairing: bool = key(
        True,
        "After the write, every row is read back and its question, answer, document and conversation must "
        "belong together.",
        **_SYNTHESIZE,
    )
    open_book: bool = key(
        False,
        "The solver has to give the answer of each pair that passes the other gates, once, from what the "
        "challenger read and without searching. Off, because a second server and an answer per pair cost "
        "time, and a weak solver refuses more right pairs than wrong ones (bench/README.md).",
        **_SYNTHESIZE,
    )
    open_book_model: str = key(
        "${solver_export:${paths.checkpoints},${add:${iteration},-1},${base_model}}",
        "The solver that answers for open_book: the last iteration's export, at first the base model.",
    )


@dataclass
class Synthesize(ChatEndpoint):
    """The synthesize stage."""

    challenger: str = key(
        "${paths.checkpoints}/challenger_iter${iteration}_hf",
        "The trained challenger: its merged export, or its run folder, whose last checkpoint is then merged "
        "first.",
    )
    partition: int = key(
        "${iteration}",
        "The prompts are dealt out like cards: partition i holds the rows i, i + partitions, … of the file. "
        "Each iteration takes the next one, so that no two solvers learn from the same prompts.",
        results=("synthesize",),
        journal=("synthesize",),
    )
    partitions: int = key(
        5,
        "How many parts there are (the paper uses a fifth of the prompts per iteration).",
        low=1,
        results=("synthesize",),
        journal=("synthesize",),
    )
    samples: int = key(
        5,
        "Conversations per prompt; the best of those that pass the gates is kept.",
        low=1,
        **_SYNTHESIZE,
    )
    val_share: Number = key(
        0.1,
        "Share of the accepted pairs that validates the solver, by whole documents, none of which it is "
        "trained on.",
        above=0,
        high=0.9,
        **_SYNTHESIZE,
    )
    max_val_rows: int = key(
        1200, "Validation rows at most: each is played every trainer.test_freq steps.", low=1, **_SYNTHESIZE
    )
    gates: Gates = group(Gates)


@dataclass
class Preview(PrepareData, ChatEndpoint):
    """The preview: prepare-data on a sample of a corpus, then questions and attempts without training."""

    documents: int = key(
        300,
        "Documents of the source that are indexed, in place of all: those that prompts are about, those that "
        "their texts name, then others at random.",
        low=1,
    )
    rows: int = key(
        40,
        "Prompts, as many of each hop count that hop_ratio has a weight for: rates by hop need some of each.",
        low=1,
    )
    heldout_rows: int = key(0, "None: nothing is trained.", low=0)
    out_dir: str = key("${run.dir}/prompts", "Where the prompts go.")
    gates: Gates = group(Gates)


@dataclass
class Merge:
    """The merge stage."""

    source: str = key(
        "${paths.checkpoints}/solver_iter${iteration}",
        "The folder of the run whose last checkpoint is merged.",
    )
    start_model: str = key(
        "${solver_export:${paths.checkpoints},${add:${iteration},-1},${base_model}}",
        "The model that the run started from, a folder or a hub id; the report says how far the weights "
        "moved from it.",
    )


@dataclass
class Evaluate(Endpoint):
    """The evaluate stage."""

    benchmarks: list[str] = key(
        ["${paths.corpus}/chains.jsonl"],
        "What is asked: csv, tsv, jsonl, json or parquet files with a question and its answers in each "
        "record, or hf://datasets/OWNER/NAME/FILE on the hub; NAME=PATH names one in the table. The seven "
        "benchmarks of the paper are hf://datasets/PeterJinGo/nq_hotpotqa_train/test.parquet. The default is "
        "the demo world's, and is refused with a collection of other documents.",
    )
    hops: list[int] | None = key(
        None,
        "Ask only questions of these hop counts, such as [1,2], and those whose count is unknown; null asks "
        "all.",
        low=1,
        results=("evaluate",),
    )
    questions_per_benchmark: int | None = key(
        None,
        "Questions of each benchmark, a choice that depends on data.seed alone; null asks all of them.",
        low=1,
        results=("evaluate",),
    )
    tokenizer: str | None = key(
        None,
        "Tokenizer of the endpoint's model, a folder or a hub id; without an endpoint it is the model's own.",
        results=("evaluate",),
    )
    num_examples: int | None = key(
        50, "Held-out rows of an environment (env=NAME), chosen by data.seed; null plays all of them.", low=1
    )
    environment: Environment = group(Environment)


@dataclass
class ServeModel:
    """The serve-model stage."""

    port: int | None = key(8080, "Port; null takes any free one.", low=1024, high=65535)
    host: str = key("127.0.0.1", "Address to bind; only this machine can reach the default.")
    background: bool = key(
        False, "Whether the command ends once the server answers, and leaves it running (until `kill PID`)."
    )
    served_name: str | None = key(
        None, "The model's name in requests; null is its hub id, or the last part of its folder's path."
    )
    call_form: str = key("hermes", _CALL_FORM, choices=tuple(FORMS))


@dataclass
class AgentBench:
    """The agent-bench."""

    agent: str | None = key(
        None,
        "What runs: module:Class, module.Class or path.py:Class of your own, the name of an environment, "
        "which the project's own agent then plays, or a stage that trains. It is the command's first word.",
    )
    agent_options: dict[str, Any] = key({}, "What the class takes at its construction, by name.")
    run_mode: str = key(
        "single",
        "Written mode=. single is one item with every model call shown; sample plays n items of data, one "
        "after the other; concurrent batch_size items, each group_size times, all at once. rollout is for a "
        "stage (challenger, solver, train): its own trainer rolls batches out, and updates nothing.",
        choices=("single", "sample", "concurrent", "rollout"),
    )
    data_file: str | None = key(
        None,
        "Written data=. The agent's items, a .jsonl or .parquet file of a mapping a row. null is one "
        "short question in messages, or the environment's held-out rows.",
    )
    n: int = key(16, "Items of mode=sample, chosen by data.seed.", low=1)
    batch_size: int = key(64, "Items at once in mode=concurrent.", low=1)
    group_size: int = key(8, "Runs of each item in mode=concurrent.", low=1)
    batches: int = key(2, "Batches of mode=rollout.", low=1)
    endpoint: str | None = key(
        None,
        "Address of an OpenAI-compatible server, such as serve-model's; null is OPENAI_BASE_URL where that "
        "is set, else http://127.0.0.1:8080/v1.",
    )
    endpoint_model: str | None = key(
        None, "Which of its models the project's own agent uses; null takes the only one it has."
    )
    deadline_s: Number = key(300, "Seconds before a run counts as failed.", above=0)
    max_pause_s: Number = key(
        1.0,
        "Seconds that the event loop may stand still. Meanwhile every other run of the process waits as "
        "well. A debugger stops it too: mode=single only reports it.",
        above=0,
    )
    reward_range: list[Number] | None = key(
        None, "Least and greatest reward, such as [0,1]; null takes any finite number."
    )
    environment: Environment = group(Environment)


@dataclass
class LoopStages:
    """Overrides of single stages; those of the command line come after them."""

    challenger: list[str] = key([], "Overrides of the challenger stages.")
    synthesize: list[str] = key([], "Overrides of the synthesize stages.")
    solver: list[str] = key([], "Overrides of the solver stages.")
    merge: list[str] = key([], "Overrides of the merge stages.")
    evaluate: list[str] = key([], "Overrides of the evaluate stages.")


@dataclass
class Evolve:
    """The loop; the keys of its stages are given to them as overrides."""

    iterations: int = key(3, "How often challenger and solver take turns.", low=1)
    keep_checkpoints: bool = key(
        False,
        "Keep every FSDP checkpoint. Otherwise the solver's goes once it is merged, and a challenger's once "
        "the next iteration's has been trained from it; a checkpoint with Adam states is six times the size "
        "of its export.",
    )
    evaluations: bool = key(
        True,
        "Evaluate the base model and each iteration's solver. false is for a corpus without benchmark "
        "questions.",
    )
    prepare_demo: bool = key(
        False, "Build the demo world, its index, prompts and models first, where they are missing."
    )
    common: list[str] = key([], "Overrides that every stage gets, in Hydra's grammar.")
    stages: LoopStages = group(LoopStages)
