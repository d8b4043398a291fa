"""The keys of single stages, each on top of what all stages have."""

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from pipeline.settings.conversations import Prompts, Rollout, Solver
from pipeline.settings.key import TORCH_DEVICE, Number, group, key
from pipeline.settings.retrieval import Chroma, Retrieval
from pipeline.settings.run import Compute, Data, Machine, Paths, Run
from pipeline.settings.watch import Flow, FlowTest, Watchdog


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
    steps_per_iteration: int = key(50, "Training steps of one iteration.", low=1)
    log_level: str = key(
        "WARNING", "What every component logs.", choices=("DEBUG", "INFO", "WARNING", "ERROR")
    )
    process_env: dict[str, Any] = key(
        {}, "Environment of every process of a run; the groups hardware/ and debug/ add to it."
    )
    paths: Paths = group(Paths)
    run: Run = group(Run)
    machine: Machine = group(Machine)
    data: Data = group(Data)
    prompts: Prompts = group(Prompts)
    rollout: Rollout = group(Rollout)
    solver: Solver = group(Solver)
    chroma: Chroma = group(Chroma)
    retrieval: Retrieval = group(Retrieval)
    flow: Flow = group(Flow)
    watchdog: Watchdog = group(Watchdog)
    compute: Compute = group(Compute)


_METHODS: dict[str, Any] = {"choices": ("hrpo", "grpo"), "run": True, "pace": True}
_METHOD_DOC = "What the trainer does with rewards; the group mode/ makes it into a trainer mode."


@dataclass
class Challenger:
    """The challenger stage."""

    method: str = key("hrpo", _METHOD_DOC, results=("challenger",), **_METHODS)
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
    workers: int = key(
        1,
        "Processes that embed: one a GPU, or a core each. More than one go through Ray, on the machines of "
        "the cluster that RAY_ADDRESS names, else on this one.",
        low=1,
    )
    device: str | None = key(
        None, "torch device of the embedding model; null is CUDA where there is one.", pattern=TORCH_DEVICE
    )


@dataclass
class PrepareData:
    """The prepare-data stage."""

    source: str | None = key(
        None,
        "A corpus to index first: a .jsonl or .parquet file, a folder of .txt and .md files, a Chroma "
        "folder or a Chroma server's address. null uses the index at chroma.path as it is. A rerun resumes "
        "where it was cut off, and embeds only documents that are new or have changed.",
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
    hop_ratio: list[int | float] = key(
        [4, 3, 2, 1], "Weights of questions of 1, 2, 3, … hops; they name the file.", low=0
    )
    max_document_tokens: int = key(
        256, "Tokens of a document (a chunk of it, where it is long), by the run's own tokenizer.", low=1
    )
    out_dir: str = key("${paths.corpus}/data", "Where the prompts go.")
    indexing: Indexing = group(Indexing)


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
        "Benchmark files for that gate, in the layouts that `evaluate` reads; without one it judges "
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
class Synthesize:
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
class Evaluate:
    """The evaluate stage."""

    benchmarks: list[str] = key(
        ["${paths.corpus}/chains.jsonl"],
        "What is asked: paths of chains.jsonl or parquet files, or hf://datasets/OWNER/NAME/FILE on the "
        "hub. The seven benchmarks of the paper are "
        "hf://datasets/PeterJinGo/nq_hotpotqa_train/test.parquet. The default is the demo world's, and is "
        "refused with a collection of other documents.",
    )
    questions_per_benchmark: int | None = key(
        None,
        "Questions of each benchmark, a choice that depends on data.seed alone; null asks all of them.",
        low=1,
        results=("evaluate",),
    )
    endpoint: str | None = key(
        None,
        "Address of an OpenAI-compatible completions server that already serves the model, such as "
        "http://127.0.0.1:8001/v1; null starts a server for solver.model_path. Answers are kept by address "
        "and model name: a server that has moved to another address needs another run.name.",
        results=("evaluate",),
    )
    endpoint_model: str | None = key(
        None, "Which of the endpoint's models; null takes the only one it has.", results=("evaluate",)
    )
    tokenizer: str | None = key(
        None,
        "Tokenizer of the endpoint's model, a folder or a hub id; without an endpoint it is the model's own.",
        results=("evaluate",),
    )


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
