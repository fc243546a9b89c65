"""``d5suite network``: a network's cost, and which backends can run it."""

from __future__ import annotations

import argparse

from d5suite.errors import ConfigurationError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser("network", help="show a network's cost, and which backends can run it")
    command.add_argument("network", metavar="NAME|FILE.onnx", help="network of the zoo, or an ONNX file")
    command.add_argument("--batch-size", type=int, default=1, metavar="N")
    command.add_argument("--image-size", type=int, default=224, metavar="PIXELS")
    command.add_argument(
        "--shape", action="append", default=[], metavar="INPUT=NxCxHxW",
        help="dimensions of an input that the file leaves open; repeat the option for several inputs",
    )  # fmt: skip
    command.add_argument(
        "--input", action="append", default=[], metavar="INPUT=VALUE",
        help="value of an input of one element, such as a sampling rate; repeat the option for several inputs",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print JSON instead of tables")
    command.add_argument("--layers", action="store_true", help="show each layer, not only the totals")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    import json

    from d5suite.network.analysis import analyse
    from d5suite.network.given_inputs import parse_inputs
    from d5suite.network.user_network import UserNetwork, load_user_network, parse_shapes
    from d5suite.network.zoo import build
    from d5suite.report.console import Console
    from d5suite.report.network import cost_table, description, show_network

    for name, most in (("batch_size", 2**31 - 1), ("image_size", 2**16)):
        value = getattr(options, name)
        if not 1 <= value <= most:
            rule = "at least 1" if value < 1 else f"at most {most}"
            raise ConfigurationError(f"--{name.replace('_', '-')} is {value}; it must be {rule}")
    if options.network.endswith(".onnx"):
        values = parse_inputs(options.input)
        given = load_user_network(
            options.network, shapes=parse_shapes(options.shape), batch_size=options.batch_size, given=values
        )
        given.check_inputs(values, {})
    elif options.shape or options.input:
        option = "--shape" if options.shape else "--input"
        raise ConfigurationError(f"{option} is for the inputs of an ONNX file", where=options.network)
    else:
        given = UserNetwork(build(options.network, image_size=options.image_size), "")
    found = description(given, batch_size=options.batch_size)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        console, network = Console(markup=False), given.network
        title = f"{network.name}, batch {network.batch_size or options.batch_size}"
        if not found["cost_unknown"]:
            console.print(cost_table(analyse(network, batch_size=options.batch_size), title, layers=options.layers))
        show_network(found, console)
    return 0 if any(each["can"] for each in found["backends"].values()) else 1
