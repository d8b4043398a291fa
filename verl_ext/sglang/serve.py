"""SGLang's server with a bearer token from the environment (SGLang 0.5.12).

    OPENAI_API_KEY=… python -m verl_ext.sglang.serve --model-path PATH      # as sglang.launch_server

With `--api-key` the process list and SGLang's log would show the token. Health and metrics stay open.
"""

import os
import sys

from drzero.ops.bearer import MODEL_KEY, bearer_of


class Hidden(str):
    """A text that hides itself when an object is logged."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Shown in logs."""
        return "'(hidden)'"


def main() -> None:
    """Serve until a signal, like `python -m sglang.launch_server`."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    arguments = prepare_server_args(sys.argv[1:])
    arguments.api_key = Hidden(bearer_of(MODEL_KEY) or "") or None
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
