"""``d5suite simulate``: a training step of up to 10,000 ranks, on SimGrid."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from d5suite.errors import ConfigurationError
from d5suite.files import given_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from d5suite.models.ceilings import Roof
    from d5suite.simulation.noise import ComputeNoise, Failures, Noisy
    from d5suite.simulation.outcome import SimulatedStep
    from d5suite.simulation.simulate import Setup
    from d5suite.simulation.step import ComputeStep

MOST_RANKS = 100_000

PART = {
    "computing": "computing", "latency": "latency of messages", "bytes": "bytes of messages",
    "sharing": "links that several messages share, or cores",
}  # fmt: skip
"""Parts of the critical path, for people."""

HOUR_S = 3600.0


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser(
        "simulate",
        help="simulate a training step of many ranks: schemes, topologies, what if",
        description="Simulate a data-parallel training step on SimGrid. Schemes and algorithms run d5suite's own code. "
        "Computing comes from a network and a machine file, from a result, or from a trace.",
    )
    command.add_argument(
        "what",
        metavar="NETWORK|RESULT.json|TRACE",
        help="a network of the zoo, FILE.onnx, a result with --passes layers, or a trace",
    )
    command.add_argument(
        "--ranks", type=int, metavar="N", help="number of ranks (default: 2; for a trace, its own number)"
    )
    command.add_argument(
        "--machine", type=given_path, metavar="FILE", help="machine file with ceilings and links (docs/simulation.md)"
    )
    command.add_argument(
        "--transport",
        metavar="NAME",
        help="transport of a measured machine file that gives α and β (default: its first)",
    )
    command.add_argument("--threads", type=int, default=1, metavar="N", help="threads per rank (%(default)s)")
    command.add_argument(
        "--scheme", default="all_reduce", metavar="NAME[:SETTING=VALUE,…]", help="default: %(default)s"
    )
    command.add_argument("--algorithm", metavar="NAME", help="algorithm of collectives (ring; for a trace, its own)")
    command.add_argument("--order", metavar="NAME", help="order of transfers: tic, tac, forward, backward, random:SEED")
    command.add_argument("--topology", default="switch", metavar="NAME", help="switch, fat-tree, dragonfly or nvlink")
    command.add_argument("--island", type=int, metavar="N", help="ranks per node (default: as in the machine file)")
    command.add_argument(
        "--cores", type=int, metavar="N",
        help="cores per node: computing, copying and messages wait for a core, and the ranks of a node compete for "
        "memory bandwidth (by default, nothing waits or competes)",
    )  # fmt: skip
    command.add_argument("--no-overlap", action="store_true", help="gradients come after the whole backward pass")
    command.add_argument(
        "--batch-size", type=int, default=32, metavar="N", help="batch size per rank, for a network (%(default)s)"
    )
    command.add_argument("--image-size", type=int, default=224, metavar="PIXELS", help="default: %(default)s")
    command.add_argument(
        "--share",
        type=float,
        default=0.5,
        metavar="X",
        help="share of the roofline that a network's nodes reach (%(default)s)",
    )
    command.add_argument(
        "--network", metavar="NAME", help="for a result: network of the zoo (default: from the recipe's name)"
    )
    command.add_argument(
        "-m", "--case", metavar="NAME", help="for a result with several cases: CASE/MEASUREMENT, or a part"
    )
    command.add_argument("--backend", metavar="NAME", help="for a result with several backends")
    command.add_argument(
        "--step", default="step", metavar="REGION", help="for a trace: the region that is one step (%(default)s)"
    )
    command.add_argument(
        "--what-if", action="append", default=[], metavar="NAME=VALUE",
        help="also simulate with a change: network=2x, latency=0.5x, compute=0.5x, ranks=2x, algorithm=NAME, "
        "scheme=NAME, order=NAME, topology=NAME, operator:Conv=0.5; repeat the option for several changes",
    )  # fmt: skip
    command.add_argument(
        "--stragglers", metavar="RESULT.json|SIGMA", help="noise on computing times: samples of a result, or log-normal"
    )
    command.add_argument(
        "--failures", metavar="HOURS[,checkpoint=S][,restart=S][,interval=S]",
        help="mean time between failures of a rank; seconds per checkpoint (60) and restart (120)",
    )  # fmt: skip
    command.add_argument("--json", type=given_path, metavar="FILE", help="also write all figures")
    command.add_argument("--trace", type=given_path, metavar="FILE.h5", help="also write a trace, for d5suite trace")
    command.set_defaults(run=_run)


class _Given(NamedTuple):
    """What is simulated, and what is known about it."""

    setup: Setup
    title: str
    measured_s: float | None
    sources: Mapping[str, str]
    missing: str


def _run(options: argparse.Namespace) -> int:
    from d5suite.errors import D5Error
    from d5suite.files import check_targets, write_json
    from d5suite.report.console import Console
    from d5suite.simulation import engine
    from d5suite.simulation.simulate import check_algorithm, simulate
    from d5suite.simulation.what_if import apply, parse

    _check(options)
    check_targets(*(each for each in (options.json, options.trace) if each))
    changes = [parse(each) for each in options.what_if]
    given = _given(options)
    noise = _noise(options.stragglers) if options.stragglers else None
    broken = _failures(options.failures, given.setup.ranks) if options.failures else None
    others = [(f"{name}={value}", apply(given.setup, name, value)) for name, value in changes]
    check_algorithm(given.setup)
    if missing := engine.problem():
        raise D5Error(missing, hint=engine.INSTALL)
    base = simulate(given.setup)
    found = [(name, other, simulate(other)) for name, other in others]
    noisy = _noisy(given.setup, noise) if noise is not None else None
    if options.trace:
        from d5suite.simulation.tracing import trace_of
        from d5suite.traces.hdf5 import write_hdf5

        write_hdf5(trace_of(base.played, given.title), options.trace)
    if options.json:
        from dataclasses import asdict

        write_json(options.json, {
            "title": given.title, "measured_s": given.measured_s, "sources": dict(given.sources),
            "missing": given.missing, **base.to_dict(),
            "what_if": [{"change": name, **each.to_dict()} for name, _, each in found],
            **({"noise": asdict(noisy)} if noisy else {}), **({"failures": asdict(broken)} if broken else {}),
        })  # fmt: skip
    show(
        given, base, [(name, other.ranks, each) for name, other, each in found], Console(markup=False, highlight=False)
    )
    for line in lines(given, base, noisy, broken):
        print(line)
    return 0


def _check(options: argparse.Namespace) -> None:
    from d5suite.simulation.platform import TOPOLOGIES

    for name, most in (("ranks", MOST_RANKS), ("threads", 4096), ("batch_size", 2**31 - 1), ("image_size", 2**16),
                       ("island", 2**16), ("cores", 4096)):  # fmt: skip
        value = getattr(options, name)
        least = 2 if name == "ranks" else 1
        if value is not None and not least <= value <= most:
            raise ConfigurationError(f"--{name.replace('_', '-')} is {value}; it must be from {least} to {most}")
    if not 0 < options.share <= 1:
        raise ConfigurationError(f"--share is {options.share:g}; it must be above 0 and at most 1")
    if options.topology not in TOPOLOGIES:
        raise ConfigurationError(
            f"there is no topology {options.topology!r}", where="--topology", hint=f"Known: {', '.join(TOPOLOGIES)}."
        )
    if options.trace and options.trace.suffix.lower() != ".h5":
        raise ConfigurationError("does not end with .h5", where=f"--trace {options.trace}")


def _given(options: argparse.Namespace) -> _Given:
    """Read what is simulated."""
    from dataclasses import replace

    from d5suite.simulation.platform import machine_figures, part_of_machine
    from d5suite.simulation.simulate import Setup, node_of
    from d5suite.simulation.step import ComputeStep
    from d5suite.simulation.what_if import in_order, scheme_settings

    settings = scheme_settings(options.scheme)
    roof, network, source = machine_figures(options.machine, transport=options.transport, threads=options.threads)
    network = replace(network, topology=options.topology)
    if options.island:
        network = replace(network, island=options.island)
    path = Path(options.what)
    measured, programs = None, None
    absent: Mapping[str, str] = {}
    algorithm, ranks = options.algorithm or "ring", options.ranks or 2
    is_one_machine = bool(options.cores) and network.island == 1
    beside = min(ranks, ranks if is_one_machine else network.island, (options.cores or 0) // options.threads)
    part, missing = part_of_machine(options.machine, ranks=beside, threads=options.threads)
    if not path.exists() or path.suffix == ".onnx":
        step = _of_network(options, part or roof, source)
    elif path.is_file() and _is_result(path):
        step, absent = _of_result(options, path, roof, source)
        step = step if part is None else step.beside(roof, part)
    else:
        from d5suite.simulation.replay import replay
        from d5suite.traces.reading import read_trace

        found = replay(read_trace(path), str(path), step=options.step)
        programs, measured, part, missing = found.programs, found.step_s, None, ""
        algorithm, ranks = options.algorithm or found.algorithm, options.ranks or len(programs)
        step = ComputeStep(f"the steps of {path.name}", (), (), 0.0, {}, "the trace")
        if options.algorithm or options.ranks:
            measured = None
    if is_one_machine:
        network = replace(network, island=ranks)
    node = node_of(step, [roof, part or roof], threads=options.threads, cores=options.cores or 0)
    early = "early gradients" not in absent and not options.no_overlap
    setup = Setup(step, settings, algorithm, ranks, network, early, programs, node,
                  "shared gradients" in absent)  # fmt: skip
    if options.order:
        setup = replace(setup, settings=in_order(setup, options.order, f"--order {options.order}"))
    shared = "; ranks of a machine share its ceilings" if part is not None else ""
    sources = {
        "computing": step.source + shared, "latency": network.sources.get("latency", ""),
        "bytes": network.sources.get("bandwidth", ""), "sharing": network.sources.get("bandwidth", ""),
    }  # fmt: skip
    return _Given(setup, step.title, measured, sources, missing)


def _of_network(options: argparse.Namespace, roof: Roof, source: str) -> ComputeStep:
    from d5suite.network.user_network import load_user_network
    from d5suite.network.zoo import build
    from d5suite.simulation.step import from_network

    if options.what.endswith(".onnx"):
        network = load_user_network(options.what, shapes={}, batch_size=options.batch_size, given={}).network
    else:
        network = build(options.what, image_size=options.image_size)
    return from_network(
        network, roof, batch=options.batch_size, share=options.share, source=f"{options.share:.0%} of the {source}"
    )


def _is_result(path: Path) -> bool:
    from d5suite.files import GZIP, read_json

    if not path.name.removesuffix(GZIP).endswith(".json"):
        return False
    content = read_json(path, any_number=True)
    return isinstance(content, dict) and "benchmarks" in content


def _records(path: Path, case: str | None, backend: str | None) -> list[tuple[str, str, Mapping[str, Any]]]:
    from d5suite.report.reading import load_results

    found: list[tuple[str, str, Mapping[str, Any]]] = [
        (title, name, record) for (title, _, name), record in load_results(path).items()
        if case is None or case in title
    ]  # fmt: skip
    if backend is None:
        return found
    exact = [each for each in found if each[1].split("@")[0] == backend]
    return exact or [each for each in found if each[2]["backend"]["name"] == backend]


def _of_result(
    options: argparse.Namespace, path: Path, roof: Roof, source: str
) -> tuple[ComputeStep, Mapping[str, str]]:
    """Take the layers pass of a training step, or its median, which counted work divides."""
    from d5suite.backends import discover
    from d5suite.network.zoo import build, name_in
    from d5suite.simulation.step import from_record

    found = [each for each in _records(path, options.case, options.backend)
             if each[2]["level"] >= 2 and each[2]["ranks"] == 1 and "median_s" in each[2]]  # fmt: skip
    found.sort(key=lambda each: "times" not in each[2].get("layers", {}))
    if not found:
        raise ConfigurationError(
            "there is no training step of one rank here", where=str(path),
            hint="Measure one: pytest recipes/ -k training_step --passes layers --benchmark-json FILE.",
        )  # fmt: skip
    title, backend, record = found[0]
    recipe = title.split("/")[0]
    name = options.network or name_in(recipe)
    if name is None:
        raise ConfigurationError(f"no network of the zoo ends the name {recipe!r}", where=title, hint="Give --network.")
    network = build(name, classes=record.get("classes", 1000), image_size=record.get("image_size", 224))
    said = f"{title} on {backend}, batch {record['batch_size']} a rank"
    step = from_record(record, network, roof, title=said, source=source)
    known = discover()[0].get(record["backend"]["name"])
    return step, {} if known is None else known.absent


def _noise(text: str) -> ComputeNoise:
    from d5suite.simulation.noise import lognormal, of_samples

    try:
        sigma = float(text)
    except ValueError:
        found = [each for each in _records(Path(text), None, None) if each[2]["ranks"] == 1 and each[2]["level"] >= 2]
        if not found:
            raise ConfigurationError("there are no samples of a training step of one rank here", where=text) from None
        title, backend, record = max(found, key=lambda each: len(each[2]["data"]))
        return of_samples(record["data"], f"{title} on {backend}")
    if not 0 < sigma < 5:
        raise ConfigurationError(f"σ is {text}; it must be above 0 and below 5", where="--stragglers")
    return lognormal(sigma)


def _noisy(setup: Setup, noise: ComputeNoise) -> Noisy:
    from dataclasses import replace

    from d5suite.simulation.noise import noisy
    from d5suite.simulation.simulate import simulate
    from d5suite.simulation.what_if import apply

    def run(factors: Sequence[float] | float) -> float:
        if isinstance(factors, float):
            return simulate(apply(setup, "compute", repr(factors))).step_s
        return simulate(replace(setup), factors, steps=1).step_s

    return noisy(run, noise, setup.ranks)


def _failures(text: str, ranks: int) -> Failures:
    from d5suite.simulation.noise import failures

    hours, *parts = text.split(",")
    known: dict[str, float | None] = {"checkpoint": 60.0, "restart": 120.0, "interval": None}
    try:
        mtbf = float(hours)
        for part in parts:
            name, _, value = part.partition("=")
            known[name if name in known else ""] = float(value)
        values = [mtbf, *(each for each in known.values() if each is not None)]
        if "" in known or not all(0 < each < 1e12 for each in values):
            raise ValueError
    except ValueError:
        raise ConfigurationError(
            f"{text!r} is not HOURS[,checkpoint=S][,restart=S][,interval=S], all positive", where="--failures"
        ) from None
    checkpoint, restart = known["checkpoint"], known["restart"]
    assert checkpoint is not None and restart is not None
    return failures(
        ranks, rank_mtbf_s=mtbf * HOUR_S, checkpoint_s=checkpoint, restart_s=restart, interval_s=known["interval"]
    )


def show(given: _Given, base: SimulatedStep, changed: Sequence[tuple[str, int, SimulatedStep]], console: Any) -> None:
    """Print the step, and each what-if beside it."""
    from d5suite.report.console import table

    setup = given.setup
    how = f"{setup.settings.name} by {setup.algorithm}" if setup.given is None else f"replayed, {setup.algorithm}"
    console.print(f"{given.title}\n{setup.ranks:,} ranks on one {setup.network.topology}, {how}" if
                  setup.network.topology == "switch" else
                  f"{given.title}\n{setup.ranks:,} ranks, {setup.network.topology}, {how}")  # fmt: skip
    headings = ("", "ranks", "step", "against", "computing", "communicating", "waiting", "bound by")
    drawn = table(*headings, words=("", "bound by"))
    for name, ranks, each in [("as given", setup.ranks, base), *changed]:
        drawn.add_row(
            name, f"{ranks:,}", seconds(each.step_s), "" if each is base else f"{each.step_s / base.step_s:.3f}",
            f"{each.computing:.0%}", f"{each.communicating:.0%}", f"{each.waiting:.0%}", each.bound,
        )  # fmt: skip
    console.print(drawn)


def lines(given: _Given, base: SimulatedStep, noisy: Noisy | None, broken: Failures | None) -> list[str]:
    """Say what bounds the step, what this rests on, and what the simulation leaves out."""
    share = base.path[base.bound]
    found = [f"{PART[base.bound].capitalize()}: {share:.0%} of the path that decides when the step ends."]
    source = given.sources.get(base.bound, "")
    found.append(f"What decides is an input: {source}. 10% off it is about {share * 10:.0f}% off the step.")
    if given.measured_s is not None:
        off = base.step_s / given.measured_s - 1
        found.append(f"The trace's own step took {seconds(given.measured_s)}; the simulated one is {off:+.1%} off.")
    if base.kinds < base.ranks:
        alike = f"{base.kinds} kind{'s' * (base.kinds > 1)} of ranks"
        longer = "; segments were made equal, by less than an element each" if base.lengthened else ""
        found.append(f"{base.ranks:,} ranks are {alike}: {base.messages:,} messages were simulated{longer}.")
    else:
        found.append(
            f"All ranks were simulated: {base.messages:,} messages in {base.steps} step{'s' * (base.steps > 1)}."
        )
    if given.missing:
        found.append(given.missing)
    if noisy is not None:
        how = f"{noisy.steps} drawn steps" if noisy.steps else "all ranks as slow as the slowest: an upper limit"
        found.append(
            f"With noise ({noisy.source}): median {seconds(noisy.median_s)}, 95% below {seconds(noisy.high_s)} ({how})."
        )
    if broken is not None:
        found.append(
            f"Some rank fails every {seconds(broken.mtbf_s)}. A checkpoint every {seconds(broken.interval_s)} leaves "
            f"{broken.efficiency:.1%} of the time (drawn: {broken.drawn:.1%})."
        )
        found.append(
            f"The best interval is {seconds(broken.best_interval_s)}; Young: {seconds(broken.young_s)}; Daly: "
            f"{seconds(broken.daly_s)}."
        )
    return found


def seconds(value: float) -> str:
    """Return a time with its unit."""
    for least, unit, factor in ((7200.0, "h", 1 / HOUR_S), (1.0, "s", 1.0), (1e-3, "ms", 1e3), (0.0, "µs", 1e6)):
        if value >= least:
            return f"{value * factor:.4g} {unit}"
    return str(value)
