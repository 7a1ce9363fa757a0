"""`python -m kvflow.demo`: the same as `kvflow demo`."""

import argparse
from pathlib import Path

from kvflow.demo.requests import Dispatch
from kvflow.demo.run import DemoOptions, demo


def main() -> int:
    parser = argparse.ArgumentParser(prog="kvflow demo")
    parser.add_argument(
        "--dispatch", choices=[*(d.value for d in Dispatch), "both"], default="both"
    )
    parser.add_argument("--json", action="store_true", help="the result as JSON on stdout")
    parser.add_argument("--keep", action="store_true", help="leave the engines up until Ctrl-C")
    parser.add_argument("--trace", type=Path, help="directory for traces and engine logs")
    parser.add_argument("--requests", type=int, default=8, help="prompts per dispatch order")
    parser.add_argument("--by-name", action="store_true", help="load the connector by its name")
    parser.add_argument("--model-directory", type=Path, help="where the tiny model is kept")
    given = parser.parse_args()
    if given.requests < 1:
        parser.error("--requests must be at least 1")
    chosen = tuple(Dispatch) if given.dispatch == "both" else (Dispatch(given.dispatch),)
    return demo(
        DemoOptions(
            dispatch=chosen,
            as_json=given.json,
            keep=given.keep,
            trace=given.trace,
            requests=given.requests,
            by_name=given.by_name,
            model_directory=given.model_directory,
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
