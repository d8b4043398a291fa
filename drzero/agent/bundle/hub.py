"""Bundles on the hub (HF_ENDPOINT, HF_TOKEN): pulled into its cache, and pushed as a private model."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from huggingface_hub import HfApi, constants, get_token, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError

from drzero.agent.bundle.manifest import MANIFEST, BundleError
from drzero.ops.console import say
from drzero.ops.hub import hub_fault

_WRITABLE = "check the name, and that HF_TOKEN may write there"
_MORE = re.compile(r"For more information check: \S+")  # about HTTP in general


def pulled(repo: str) -> Path:
    """The folder of a bundle in the hub's cache, downloaded if the hub answers. Raises BundleError."""
    fault = hub_fault()
    with _in_words(f"bundle={repo}", fault or "correct the name, or set HF_TOKEN if it is private"):
        try:
            # First, so that a model that is no bundle costs no download.
            hf_hub_download(repo, MANIFEST, local_files_only=fault is not None)
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError as error:
            raise BundleError(f"bundle={repo}: there is no bundle in it (no {MANIFEST})") from error
        return Path(snapshot_download(repo, local_files_only=fault is not None))


def check_push(repo: str) -> None:
    """Find out before anything is written what would refuse a push. Raises BundleError."""
    if fault := hub_fault():
        raise BundleError(f"push={repo}: {fault}. Restore the connection, or leave push= out")
    if get_token() is None:
        raise BundleError(f"push={repo}: set HF_TOKEN to a token that may write there")
    with _in_words(f"push={repo}", _WRITABLE):
        HfApi().whoami()
        try:
            names = HfApi().list_repo_files(repo)
        except RepositoryNotFoundError:  # or hidden from this token, and then the upload is refused
            return
    if MANIFEST not in names and set(names) - {".gitattributes", "README.md"}:
        raise BundleError(f"push={repo}: it holds another model, which is not replaced. Name a new one")


def push(folder: Path, repo: str) -> None:
    """Upload a bundle in one commit, as a private model if it is new. Raises BundleError."""
    api = HfApi()
    with _in_words(f"push={repo}", _WRITABLE):
        api.create_repo(repo, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=repo, folder_path=folder, delete_patterns="*", commit_message="A bundle of drzero"
        )
        private = api.model_info(repo).private
    place = f"{constants.ENDPOINT.rpartition('@')[2]}/{repo}"
    say(
        "bundle",
        f"pushed to {place} ({'private; its settings there can publish it' if private else 'public'})",
    )


@contextmanager
def _in_words(what: str, advice: str) -> Iterator[None]:
    """Translate the hub client's errors, httpx's for a failed connection, and RuntimeError for an upload."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, httpx.HTTPError) as error:
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        said = " ".join(_MORE.sub("", str(cause)).split())[:400].rstrip(".")
        raise BundleError(f"{what}: the hub refuses or fails: {said}. {advice}") from error
