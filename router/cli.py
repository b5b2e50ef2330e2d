"""The `diptych` command: arguments, dispatch and exit codes.

Exit codes: 0 done, 1 failed, 2 usage or config. Commands live in modules of their own and raise
`DiptychError`; this one turns it into a sentence. Imports stay light, so that `status` is quick.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import ConfigError, DiptychError
from router.command.console import Console

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Command = Callable[[argparse.Namespace, Console], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    # a shell starts background jobs with SIGINT ignored; everything started here inherits it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    args = _parser().parse_args(argv)
    console = Console()
    try:
        command: Command = args.command
        return command(args, console)
    except ConfigError as error:
        console.complain(error.message)
        return 2
    except DiptychError as error:
        console.complain(error.message)
        return 1
    except KeyboardInterrupt:
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="diptych", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="start a cluster and serve until Ctrl-C")
    _add_config(up)
    up.add_argument("--detach", action="store_true", help="return once it serves")
    up.add_argument("--local", action="store_true", help="one process, without Ray")
    up.add_argument("--demo", action="store_true", help="stream one answer before serving")
    up.set_defaults(command=_up)

    down = commands.add_parser("down", help="stop a running cluster")
    _add_url(down)
    down.set_defaults(command=_down)

    status = commands.add_parser("status", help="show workers, blocks and links")
    status.add_argument("--json", action="store_true", help="the whole object")
    _add_url(status)
    status.set_defaults(command=_status)

    chat = commands.add_parser("chat", help="stream an answer and show where its time went")
    chat.add_argument("text", nargs="?", metavar="TEXT", help="without it: a conversation")
    chat.add_argument("--max-tokens", type=int, default=256, help="per answer (default 256)")
    _add_url(chat)
    chat.set_defaults(command=_chat)

    config = commands.add_parser("config", help="check a config file, or print its schema")
    actions = config.add_subparsers(required=True, metavar="ACTION")
    check = actions.add_parser("check", help="name what is wrong with a file")
    _add_config(check)
    check.set_defaults(command=_config_check)
    schema = actions.add_parser("schema", help="print the JSON schema of the file")
    schema.set_defaults(command=_config_schema)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", nargs="?", type=Path, metavar="CONFIG", help="YAML (default: built in)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override, e.g. http.port=0"
    )


def _add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="of the cluster (default: the one that runs here)")


def _up(args: argparse.Namespace, console: Console) -> int:
    from router.command.signals import StopSignals
    from router.command.up import up

    return up(args, console, StopSignals())


def _down(args: argparse.Namespace, console: Console) -> int:
    from router.command.down import down

    return down(args.url, console)


def _status(args: argparse.Namespace, console: Console) -> int:
    from router.command.client import ClusterClient
    from router.command.status import show

    status = ClusterClient(_url(args)).status()
    if args.json:
        console.say(json.dumps(status, indent=2))
    else:
        show(status, console)
    return 0


def _chat(args: argparse.Namespace, console: Console) -> int:
    from router.command.chat import chat
    from router.command.client import ClusterClient

    return chat(ClusterClient(_url(args)), console, args.text, args.max_tokens)


def _config_check(args: argparse.Namespace, console: Console) -> int:
    from cluster.config import load_config

    config = load_config(args.config, args.set)
    pools = f"{config.prefill_replicas} prefill + {config.decode_replicas} decode"
    console.say(f"{args.config or 'built-in config'}: valid ({config.mode}, {pools} workers)")
    return 0


def _config_schema(args: argparse.Namespace, console: Console) -> int:
    from cluster.config import config_schema

    console.say(json.dumps(config_schema(), indent=2))
    return 0


def _url(args: argparse.Namespace) -> str:
    from router.command.down import pick

    if args.url:
        return str(args.url)
    note = pick(None)
    return note.url if note else "http://127.0.0.1:8000"


if __name__ == "__main__":
    sys.exit(main())
