"""The keys of single stages, on top of the keys that all stages have."""

from dataclasses import dataclass
from typing import Any

from drzero.recipe.settings.conversations import Prompts, Rollout, Solver
from drzero.recipe.settings.key import CONVERSING, FLOATS, MISSING, TORCH_DEVICE, Number, group, key
from drzero.recipe.settings.retrieval import Chroma, Faiss, Retrieval
from drzero.recipe.settings.run import Compute, Data, Machine, Paths, QuestionFields, Run
from drzero.recipe.settings.watchdog import Collapse, Flow, FlowTest, Watchdog
from environments.call import FORMS

_PREVIOUS_SOLVER = "${previous_solver:${paths.checkpoints},${iteration},${base_model}}"


@dataclass
class Common:
    """Every stage."""

    base_model: str = key(MISSING, "Start model, a folder or a hub id. model= sets it.", run=True, pace=True)
    iteration: int = key(1, "The loop's iteration, which names runs and start weights.", low=0, run=True)
    hop_ratio: list[int] = key([4, 3, 2, 1], "Weights of questions with 1, 2, 3, … hops.", low=0)
    steps_per_iteration: int = key(50, "Training steps per iteration.", low=1)
    log_level: str = key("WARNING", "Log level everywhere.", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    verbose: bool = key(False, "Print each component's output, which its log always has.")
    fused_head: bool = key(
        True,
        "Compute log-probabilities on a GPU without whole logits: false for a model whose head is not tied "
        "to its embeddings.",
    )
    process_env: dict[str, Any] = key({}, "Environment variables of all processes. hardware= adds some.")
    paths: Paths = group(Paths)
    run: Run = group(Run)
    machine: Machine = group(Machine)
    data: Data = group(Data)
    question_fields: QuestionFields = group(QuestionFields)
    prompts: Prompts = group(Prompts)
    rollout: Rollout = group(Rollout)
    solver: Solver = group(Solver)
    index: str = key("chroma", "Index back end.", choices=("chroma", "faiss"), results=CONVERSING)
    chroma: Chroma = group(Chroma)
    faiss: Faiss = group(Faiss)
    retrieval: Retrieval = group(Retrieval)
    flow: Flow = group(Flow)
    watchdog: Watchdog = group(Watchdog)
    collapse: Collapse = group(Collapse)
    compute: Compute = group(Compute)


_METHODS: dict[str, Any] = {"choices": ("hrpo", "grpo", "environment"), "run": True, "pace": True}
_METHOD_DOC = "How the trainer computes advantages."


@dataclass
class Challenger:
    """The challenger stage."""

    method: str = key("hrpo", _METHOD_DOC, results=("challenger",), **_METHODS)
    open_book_check: bool = key(
        False,
        "A question earns difficulty only if the solver, shown the challenger's passages, gives its answer "
        "(Search Self-Play, arXiv 2510.18821).",
        results=("challenger",),
        run=True,
    )
    hop_check: bool = key(
        False,
        "A multi-hop question earns difficulty only if each further hop was searched for, the answer is not "
        "in the document, and no single search leads to it (docs/learning.md).",
        results=("challenger",),
        run=True,
    )
    continue_from: str | None = key(
        "${previous_challenger:${paths.checkpoints},${iteration}}",
        "Run whose last checkpoint the first start resumes; null starts from base_model.",
    )
    allow_off_policy: bool = key(False, "Allow asynchronous modes for HRPO.", results=("challenger",))


@dataclass
class SolverStage:
    """The solver stage."""

    method: str = key("grpo", _METHOD_DOC, results=("solver",), **_METHODS)
    balance_hops: bool = key(
        False,
        "Give every hop count the same share of an update, for small batches (docs/learning.md).",
        results=("solver",),
        run=True,
    )


_CALL_FORM = (
    "How the model writes tool calls: auto (as its chat template does), hermes (JSON in <tool_call> tags), "
    "xlam (one JSON array), llama3 (a JSON object), mistral (a JSON array after [TOOL_CALLS])."
)
_FORMS = ("auto", *FORMS)


@dataclass
class Environment:
    """The environment to train or evaluate in, other than corpus search."""

    name: str | None = key(None, "Its name, as in env=NAME. null in evaluate asks the benchmarks.", run=True)
    options: dict[str, Any] = key({}, "Arguments of its load(): environment.options.turns=4.", run=True)
    max_turns: int | None = key(None, "Assistant turns; null lets the environment decide.", low=1, run=True)
    call_form: str = key("auto", _CALL_FORM, choices=_FORMS, run=True)
    filter_groups: bool | None = key(None, "Replace groups of equal rewards; null: the environment decides.")


@dataclass
class Train:
    """The train stage: GRPO in any environment."""

    method: str = key("environment", _METHOD_DOC, results=("train",), **_METHODS)
    steps: int = key(200, "Training steps.", low=1)
    train_rows: int | None = key(None, "Rows to train on; null takes all.", low=1, run=True)
    val_rows: int = key(50, "Held-out rows per validation.", low=1)
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
        256, "Tokens per chunk, with prefix and title. Longer documents are split.", low=1
    )
    chunk_overlap: int = key(32, "Tokens repeated between chunks.", low=0)
    kind: str = key(
        "flat",
        "FAISS index type: flat is exact, hnsw faster on a CPU and larger, ivfpq smallest, but finds less.",
        choices=("flat", "hnsw", "ivfpq"),
    )
    workers: int = key(1, "Embedding processes. More than one use Ray, at RAY_ADDRESS or here.", low=1)
    embed_only: bool = key(False, "Only embed. The same command without this writes index and prompts.")
    writers: int = key(2, "Shards written in parallel; their memory adds up.", low=1)
    device: str | None = key(None, "Device of the embedding model; null detects CUDA.", pattern=TORCH_DEVICE)
    query_prefix: str | None = key(None, "Text before each query; null is the model's. The index keeps it.")
    passage_prefix: str | None = key(None, "The same before each passage.")


@dataclass
class SourceFields:
    """Field names in tables (.jsonl, .json, .csv, .tsv, .parquet)."""

    text: str | None = key(None, "The text; null is `text`, or `contents` with the title on its first line.")
    title: str | None = key(None, "The title; null is `title`, which is optional.")
    id: str | None = key(None, "The id; null is `id`, or a hash of title and text.")


@dataclass
class PrepareData:
    """The prepare-data stage."""

    source: str | None = key(
        None,
        "Corpus to index first: a file, folder, glob, hub data set or Chroma (docs/retrieval.md). null uses "
        "the existing index.",
    )
    fields: SourceFields = group(SourceFields)
    on_bad: str = key("stop", "Unusable records: stop lists all, skip drops them.", choices=("stop", "skip"))
    encoding: str | None = key(
        None, "Encoding of files that are not UTF-8 and declare none, such as cp1250; null guesses."
    )
    source_collection: str | None = key(None, "Collection to read from a Chroma source.")
    replace: bool = key(False, "Rebuild a collection of other documents, embedder or chunk size.")
    rows: int = key(38400, "Prompts to write.", low=1)  # 3 iterations of 50 steps of 256
    heldout_rows: int = key(256, "Prompts of the held-out split.", low=0)
    hold_out: list[str] = key([], "Benchmark files whose documents (doc_ids) no prompt shows.")
    min_document_tokens: int = key(24, "Least tokens of a document that a prompt may show.", low=0)
    min_prose: float = key(0.15, "Least share of sentences: less is code, tables or lists.", low=0, high=1)
    max_document_tokens: int = key(256, "Most tokens of a document shown in a prompt.", low=1)
    fit_hops: bool = key(True, "Ask for no more hops than the corpus's links allow (data/links.py).")
    out_dir: str = key("${paths.corpus}/data", "Where prompts go.")
    indexing: Indexing = group(Indexing)


_WITH_ENDPOINT = ("synthesize", "evaluate", "preview")
_ENDPOINT_MODEL = "Model name at the endpoint; null takes its only one."
_ENDPOINT = (
    "OpenAI-compatible server to use, such as http://127.0.0.1:8001/v1. For another, set another run.name."
)


@dataclass
class Endpoint:
    """A server to use instead of starting one, over chat completions, with its prices."""

    endpoint: str | None = key(None, _ENDPOINT, results=_WITH_ENDPOINT)
    endpoint_model: str | None = key(None, _ENDPOINT_MODEL, results=_WITH_ENDPOINT)
    endpoint_key: str = key(
        "OPENAI_API_KEY",
        "Environment variable with the endpoint's key.",
        pattern=(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable"),
    )
    usd_per_million_in: int | float | None = key(None, "Price of a million tokens read, in dollars.", low=0)
    usd_per_million_out: int | float | None = key(None, "Price of a million tokens written.", low=0)


@dataclass
class EitherEndpoint(Endpoint):
    """An endpoint used over completions of token ids, or over chat completions."""

    api: str = key(
        "completions",
        "completions sends the endpoint token ids and needs tokenizer=, chat sends it messages and tools.",
        choices=("completions", "chat"),
    )
    tokenizer: str | None = key(None, "Tokenizer of the endpoint's model.", results=("evaluate",))


@dataclass
class Comparison:
    """Prompts and tolerances of compare-rollouts.

    A tolerance of null depends on solver.dtype: 16 bits have three digits, float32 adds up to 1e-5.
    """

    data: str = key("${data.train_files}", "Prompts (data=): a stage's parquet, or evaluate's questions.")
    n: int | None = key(None, "Prompts (n=); null takes 64, on a CPU 8.", low=1, high=10_000)
    tokens: int = key("${rollout.max_tokens_per_turn}", "Most tokens of a continuation.", low=1)
    draws: int = key(100, "Draws per place and setting, to test the sampler.", low=50)
    places: int = key(3, "Such places, each after another prompt.", low=1)
    dtype: str = key("float32", "Transformers' precision; bfloat16 if it does not fit.", choices=FLOATS)
    tie_nats: int | float | None = key(None, "Tokens this close tie; null is 0.001, in 16 bits 0.25.", low=0)
    mean_gap_nats: int | float | None = key(
        None, "Mean log-prob gap; null is 0.0001, in 16 bits 0.02.", low=0
    )
    largest_gap_nats: int | float | None = key(None, "Largest gap; null is 0.005, in 16 bits 1.", low=0)
    differing_share: Number = key(0, "Share of greedy sequences that may differ beyond ties.", low=0, high=1)
    score_gap: Number = key(0.05, "Gap of mean scores between both sides' greedy turns.", low=0, high=1)
    min_p_value: Number = key(
        1e-5, "Least p-value of the sampler's tests (1 in 10,000 fails).", above=0, high=0.05
    )


@dataclass
class CompareRollouts:
    """The comparison of an engine with Transformers."""

    endpoint: str | None = key(None, "A running server (with solver.dtype); null starts rollout='s.")
    endpoint_model: str | None = key(None, _ENDPOINT_MODEL)
    compare: Comparison = group(Comparison)


_SYNTHESIZE: dict[str, Any] = {"results": ("synthesize",)}


@dataclass
class Gates:
    """Gates a pair must pass before the solver sees it (data/gates.py).

    A rerun with other gates judges the same samples again.
    """

    evidence: bool = key(True, "The answer is in the document or the retrieved passages.", **_SYNTHESIZE)
    hops: bool = key(
        True, "h hops took h - 1 searches, and the first document lacks the answer.", **_SYNTHESIZE
    )
    integrity: bool = key(True, "One question of at most 50 words, without its short answer.", **_SYNTHESIZE)
    max_answer_words: int = key(10, "Most words of an answer.", low=1, **_SYNTHESIZE)
    duplicates: bool = key(True, "No two questions have the same words.", **_SYNTHESIZE)
    near_duplicates: bool = key(True, "No paraphrases with the same answer or document.", **_SYNTHESIZE)
    near_duplicate_cosine: int | float | None = key(
        None,
        "Cosine from which questions are paraphrases; null measures it on the demo world.",
        above=0,
        high=1,
        **_SYNTHESIZE,
    )
    contamination: bool = key(True, "No words or facts shared with a benchmark.", **_SYNTHESIZE)
    contamination_ngram: int = key(8, "Words in a row that count as shared.", low=2, **_SYNTHESIZE)
    benchmarks: list[str] = key([], "Benchmark files for that gate.")
    pairing: bool = key(True, "Each written row's parts still belong together.", **_SYNTHESIZE)
    open_book: bool = key(
        False,
        "The solver gives the same answer from the challenger's passages. A weak one refuses right pairs.",
        **_SYNTHESIZE,
    )
    open_book_model: str = key(_PREVIOUS_SOLVER, "Solver for open_book.")


@dataclass
class Synthesize(Endpoint):
    """The synthesize stage."""

    challenger: str = key("${paths.checkpoints}/challenger_iter${iteration}_hf", "Its export or run folder.")
    partition: int = key(
        "${iteration}",
        "Part of the prompts to use: every partitions-th row, from this one.",
        results=("synthesize",),
        journal=("synthesize",),
    )
    partitions: int = key(5, "Parts of the prompts.", low=1, results=("synthesize",), journal=("synthesize",))
    samples: int = key(5, "Conversations per prompt; the best passing one is kept.", low=1, **_SYNTHESIZE)
    val_share: Number = key(0.1, "Share of pairs for validation.", above=0, high=0.9, **_SYNTHESIZE)
    max_val_rows: int = key(1200, "Most validation rows.", low=1, **_SYNTHESIZE)
    gates: Gates = group(Gates)


@dataclass
class Preview(PrepareData, Endpoint):
    """The preview: prepare-data on a sample of a corpus, then questions and attempts without training."""

    documents: int = key(300, "Documents to index, with their linked ones first.", low=1)
    rows: int = key(40, "Prompts, spread over the hop counts.", low=1)
    heldout_rows: int = key(0, "Prompts of the held-out split.", low=0)
    out_dir: str = key("${run.dir}/prompts", "Where prompts go.")
    gates: Gates = group(Gates)


@dataclass
class WarmStart(Preview):
    """The warm start: a preview's or synthesize's good conversations, and a supervised training on them."""

    demonstrations: list[str] = key(
        [],
        "Written from=: run folders of preview or synthesize to learn from. Without any, endpoint= makes a "
        "preview first.",
    )
    epochs: Number = key(3, "Passes over the demonstrations.", above=0)
    batch_size: int = key(8, "Demonstrations of an update, on all GPUs together.", low=1)
    learning_rate: Number = key(
        2e-4, "Learning rate: about 1e-3 for an adapter of a model of 100M, 1e-5 for whole weights.", above=0
    )
    lora_rank: int = key(
        16, "Rank of the adapter, which the model then contains; 0 trains all weights.", low=0
    )
    held_out_share: Number = key(0.1, "Share of pairs to measure with, by document.", above=0, high=0.5)
    check: int = key(24, "Held-out documents to ask about before and after; 0 for none.", low=0)
    least: int = key(20, "Demonstrations below which nothing is trained.", low=2)
    terms: str | None = key(
        None, "For the model card: under whose terms the teacher's words may train a model."
    )
    settings_of: str = key("qwen2.5-3b", "Option of config/model/ for the new model; model= sets it.")


@dataclass
class Merge:
    """The merge stage."""

    source: str = key("${paths.checkpoints}/solver_iter${iteration}", "Run whose last checkpoint is merged.")
    start_model: str = key(_PREVIOUS_SOLVER, "The run's start model, to report how far weights moved.")


@dataclass
class Evaluate(EitherEndpoint):
    """The evaluate stage."""

    benchmarks: list[str] = key(
        ["${paths.corpus}/chains.jsonl"],
        "Question files (csv, tsv, jsonl, json, parquet) or hf://datasets/OWNER/NAME/FILE. NAME=PATH names "
        "one (docs/evaluation.md).",
    )
    hops: list[int] | None = key(
        None,
        "Ask only these hop counts, such as [1,2], and unknown ones; null asks all.",
        low=1,
        results=("evaluate",),
    )
    questions_per_benchmark: int | None = key(
        None, "Questions per benchmark, chosen by data.seed; null asks all.", low=1, results=("evaluate",)
    )
    num_examples: int | None = key(50, "Held-out rows of an environment (env=NAME); null plays all.", low=1)
    environment: Environment = group(Environment)


@dataclass
class Ask(EitherEndpoint):
    """The agent to ask."""

    bundle: str | None = key(
        None,
        "Bundle to start from instead of a loop: its folder, or OWNER/NAME on the hub. Without an index "
        "inside, also name a copy of its index.",
    )


@dataclass
class Bundle:
    """The bundle to write."""

    out: str = key(MISSING, "Folder to write. A bundle there is replaced, anything else refused.")
    with_index: bool = key(False, "Put the index inside, and its embedder if that is a folder.")
    licence: str | None = key(None, "Licence of the base model, for the card: apache-2.0.")
    corpus_licence: str | None = key(None, "Licence of the corpus, for the card.")
    datasets: list[str] = key([], "Data sets on the hub that the corpus came from, for the card.")
    push: str | None = key(
        None,
        "Upload it to the hub as OWNER/NAME, private if it is new (HF_TOKEN, HF_ENDPOINT).",
        pattern=(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", "OWNER/NAME"),
    )


@dataclass
class ServeAgent(Ask):
    """The agent as a service."""

    port: int | None = key(8090, "Port; null takes any free one.", low=1024, high=65535)
    host: str = key("127.0.0.1", "Address to bind. Any other needs AGENT_TOKEN.")
    sources_in_text: bool = key(True, "List the sources below a chat's answer too.")


@dataclass
class ServeModel:
    """The serve-model stage."""

    port: int | None = key(8080, "Port; null takes any free one.", low=1024, high=65535)
    host: str = key("127.0.0.1", "Address to bind.")
    background: bool = key(False, "Return once the server answers, and leave it running.")
    served_name: str | None = key(None, "Model name in requests; null is the hub id or folder name.")
    call_form: str = key("auto", "How the model writes calls, as environment.call_form.", choices=_FORMS)


@dataclass
class AgentBench:
    """The agent-bench."""

    agent: str | None = key(None, "First word: path.py:function, a class, environment or stage.")
    agent_options: dict[str, Any] = key({}, "Arguments of the function or class, by name.")
    run_mode: str = key(
        "single",
        "Written mode=: single shows each model call of one item, sample runs n items in turn, concurrent "
        "batch_size × group_size at once, rollout in a stage's own trainer.",
        choices=("single", "sample", "concurrent", "rollout"),
    )
    tasks: str | None = key(None, "File of tasks; null is a question or the environment's rows.")
    n: int = key(16, "Items of mode=sample.", low=1)
    batch_size: int = key(64, "Items at once in mode=concurrent.", low=1)
    group_size: int = key(8, "Runs of each item in mode=concurrent.", low=1)
    batches: int = key(2, "Batches of mode=rollout.", low=1)
    serve: bool = key(False, "Serve model= for the runs, with rollout='s engine; false asks the endpoint.")
    endpoint: str | None = key(None, "Server; null is OPENAI_BASE_URL or http://127.0.0.1:8080/v1.")
    endpoint_model: str | None = key(None, "Model there; null takes the only one, your agent's the first.")
    deadline_s: Number = key(300, "Seconds before a run counts as failed.", above=0)
    max_pause_s: Number = key(1.0, "Seconds the event loop may block (mode=single only reports it).", above=0)
    reward_range: list[Number] | None = key(None, "Allowed rewards, such as [0,1]; null takes any number.")
    environment: Environment = group(Environment)


_OF_THE_STAGE = "Overrides of this stage."


@dataclass
class LoopStages:
    """Overrides of single stages, applied before the command line's."""

    challenger: list[str] = key([], _OF_THE_STAGE)
    synthesize: list[str] = key([], _OF_THE_STAGE)
    solver: list[str] = key([], _OF_THE_STAGE)
    merge: list[str] = key([], _OF_THE_STAGE)
    evaluate: list[str] = key([], _OF_THE_STAGE)


@dataclass
class Evolve:
    """The loop. It passes the keys of its stages to them as overrides."""

    iterations: int = key(3, "Iterations of challenger and solver.", low=1)
    keep_checkpoints: bool = key(False, "Keep every FSDP checkpoint (six times an export's size).")
    evaluations: bool = key(True, "Evaluate the base model and each solver.")
    prepare_demo: bool = key(False, "First build missing parts of the demo world.")
    common: list[str] = key([], "Overrides for every stage.")
    stages: LoopStages = group(LoopStages)
