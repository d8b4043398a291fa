"""SGLang's server with the bearer token of the environment (SGLang 0.5.12): the flag would show it to all.

    OPENAI_API_KEY=… python -m verl_ext.sglang.serve --model-path PATH      # as sglang.launch_server

SGLang takes its token by `--api-key`, which the process list has, and logs all of its arguments at INFO. Here
it is added after the command line is read, as a text that does not show itself. Health and metrics stay open,
as SGLang has it.
"""

import os
import sys

from drzero.ops.bearer import MODEL_KEY, bearer_of


class Hidden(str):
    """A text that is used as any other, and not shown where a whole object is."""

    __slots__ = ()

    def __repr__(self) -> str:
        """What a log has in its place."""
        return "'(hidden)'"


def main() -> None:
    """Serve until a signal, as `python -m sglang.launch_server` does."""
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
