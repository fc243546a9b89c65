"""The conformance kit: right adapters pass, planted faults are caught, and empty proofs fail."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Lock

import pytest

from d5suite.backends import discover
from d5suite.levels.contract import CLAUSES
from d5suite.testing.networks import LIGHT
from d5suite.testing.test_networks import LIGHTEST
from tests.conftest import plugin_environment

TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not TORCH, reason="the mistakes are made in PyTorch")


def kit(backend: str, *modules: str, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run modules of the kit, by default all, as a user does with ``pytest --pyargs``."""
    chosen = ["--pyargs", *(modules or ["d5suite.testing"]), "--backend", backend, *options]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *chosen],
        env=plugin_environment(),
        capture_output=True,
        text=True,
        timeout=1800,
    )


BUILT_IN = ("keras", "jax", "tensorflow", "torch", "mxnet", "deep500")
"""The slowest first: two run at a time."""
QUICK = ("-m", "not slow")
"""Options of the kit's short form; the full form takes none."""
SHORT = ("deep500",)
"""The adapters whose short form runs in `make test`; the full form of all runs in `make test-all`.
The backend ``wrong`` without a mistake stands for PyTorch."""
FORMS = [
    *(pytest.param(name, (), id=f"{name}-full", marks=pytest.mark.slow) for name in BUILT_IN),
    *(pytest.param(name, QUICK, id=f"{name}-quick", marks=pytest.mark.quick) for name in SHORT),
]

PARTIAL = ("-q", *QUICK)
"""Options of the kit for the backend ``partial``."""

Kits = Callable[..., "subprocess.CompletedProcess[str]"]
Forked = Callable[..., "tuple[int, str]"]
Catching = Callable[[str, str, int], "tuple[int, str]"]


@pytest.fixture(scope="module")
def kits(request: pytest.FixtureRequest, catching: Catching) -> Iterator[Kits]:
    """Run the kits that the collected tests need, as many at once as there are processors.

    The cases that catch mistakes run beside them, one mode after another.
    """
    wanted: dict[tuple[str, tuple[str, ...]], None] = {}
    modes: dict[tuple[str, str], None] = {}
    for item in request.session.items:
        test = getattr(item, "originalname", None) if item.path == request.path else None
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if test == "test_a_built_in_adapter_conforms" and not discover()[0][given["name"]].problem():
            wanted[given["name"], given["form"]] = None
        elif test == "test_a_run_of_the_whole_kit_wants_every_level_proved" and TORCH:
            wanted["partial", PARTIAL] = None
        elif test == "test_the_short_form_catches_a_mistake" and TORCH:
            modes[_maker(given["mistake"]), given["mistake"]] = None
        elif test == "test_the_same_backend_without_a_mistake_passes" and TORCH:
            modes[given["name"], "right"] = None

    def catch() -> None:
        for backend, mode in modes:
            catching(backend, mode, 1)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        pool.submit(catch)
        runs = {(name, form): pool.submit(kit, name, options=form) for name, form in wanted}
        yield lambda name, form, attempt: runs[name, form].result() if attempt == 1 else kit(name, options=form)
        pool.shutdown(cancel_futures=True)


@pytest.mark.alone
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_a_built_in_adapter_conforms(kits: Kits, name: str, form: tuple[str, ...], attempt: int) -> None:
    problem = discover()[0][name].problem()
    if problem:
        pytest.skip(problem)
    done = kits(name, form, attempt)
    assert done.returncode == 0, _failures(done)
    total = _total(done)
    assert int(total[1]) > 150 and int(total[2]) == 0


def _failures(done: subprocess.CompletedProcess[str]) -> str:
    """Return what failed, and how the first of it did."""
    _, _, told = done.stdout.partition(" FAILURES ")
    named = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "\n".join([*named, told[:4000] or done.stdout[-4000:], done.stderr[-1000:]])


def _total(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the last row of the table."""
    return next(line.split() for line in done.stdout.splitlines() if line.startswith("total"))


EVERY = "test_every_call_of_one_shape_is_answered_anew_and_its_answer_kept"
FED = "test_an_array_that_was_fed_is_neither_changed_nor_kept"
FEEDS = "test_every_feed_of_an_operator_is_answered_and_its_answer_kept"
BACKWARD = "test_every_backward_pass_of_an_operator_is_made_anew"

PARTED = "test_gradients_and_their_update_make_a_step"
AVERAGED = "test_replicas_with_averaged_gradients_train_as_one_process[clip-norm-2]"
CHANGED = "test_the_arrays_of_gradients_are_the_callers_to_change[fp64]"
WEIGHTS = "test_parameters_are_copied_and_the_optimizers_state_stays"

SCHEMED = ("added", "lonely", "lost", "constant", "remembering")
"""Mistakes of a framework's own scheme."""

MISTAKES = [
    ("padding", "test_operators", "test_operator_means_what_onnx_says[Conv", "operators.meaning"),
    ("sum", "test_gradients", "test_gradient_of_network[classifier", "gradient.meaning"),
    ("tripled", "test_gradients", "test_gradient_of_network[classifier", "gradient.meaning"),
    ("tripled", "test_level0", "test_backward[Softmax", "operator.backward"),
    ("dampening", "test_training", "test_optimizer_follows_its_formula[momentum-fp64]", "trainer.meaning"),
    ("uphill", "test_training", "test_optimizer_follows_its_formula[adam-fp32]", "trainer.meaning"),
    *(
        (name, "test_training", "test_two_hundred_steps_follow_the_formula", "trainer.meaning")
        for name in ("halts", "captures", "alternates", "restless", "quarters", "narrow")
    ),
    *(
        (name, "test_dropout", "test_dropout_drops_scales_and_draws_as_it_should[0.25]", "operators.meaning")
        for name in (
            "rare_dropout",
            "one_mask",
            "channel_masks",
            "few_masks",
            "unscaled",
            "undropped",
            "two_masks",
        )
    ),
    ("forgetful", "test_training", "test_training_goes_on_from_a_saved_state", "trainer.state"),
    ("lenient", "test_networks", "test_bad_input_is_refused", "executor.feed"),
    ("single_output", "test_networks", "test_an_output_may_be_constant", "executor.forward"),
    ("axis", "test_level0", "test_forward[Softmax", "operators.meaning"),
    ("dropped", "test_level0", "test_backward[Softmax", "operator.backward"),
    ("unsynchronized", "test_level0", "test_synchronize_waits_for_an_operator", "operator.synchronize"),
    ("unsynchronized", "test_process", "test_synchronize_waits_for[inference]", "executor.synchronize"),
    ("threads", "test_process", "test_the_thread_budget_is_obeyed[inference]", "runtime.threads"),
    ("gradient_threads", "test_process", "test_the_thread_budget_is_obeyed[gradients]", "runtime.threads"),
    ("seedless", "test_process", "test_a_seed_decides_the_random_numbers", "runtime.seed"),
    ("eventless", "test_discovery", "test_it_has_what_gpus_need_or_says_why_not[event_timer-", "backend.modules"),
    ("chatty", "test_process", "test_nothing_is_printed_while_a_network_runs", "executor.quiet"),
    ("negative", "test_networks", "test_layer_times_are_of_nodes_and_can_be_true", "profile.times"),
    ("statistics", "test_networks", "test_inference_changes_nothing", "executor.inference"),
    ("unbiased", "test_gradients", "test_running_statistics_are_the_neutral_ones", "executor.statistics"),
    ("inside", "test_training", "test_optimizer_follows_its_formula[rates-fp64]", "trainer.meaning"),
    ("detached", "test_gradients", "test_gradient_of_network[classifier", "gradient.meaning"),
    ("tail", "test_networks", "test_every_image_of_a_larger_batch_is_answered[17]", "executor.forward"),
    ("tail", "test_gradients", "test_gradient_of_a_larger_batch", "gradient.meaning"),
    ("clipped", "test_answers", f"{FED}[forward-fp32]", "executor.copy"),
    ("view", "test_answers", f"{FED}[forward-fp32]", "executor.copy"),
    ("view", "test_answers", f"{FED}[steps-fp64]", "executor.copy"),
    ("view", "test_level0", f"{FEEDS}[Softmax-fp32]", "operator.copy"),
    ("loaded_view", "test_networks", "test_parameters_come_back_as_they_were_given", "executor.parameters"),
    ("loaded_view", "test_training", "test_training_goes_on_from_a_saved_state", "trainer.state"),
    ("loaded_view", "test_training", "test_gradients_with_dropout_are_drawn_again", "executor.random"),
    ("wide", "test_networks", "test_every_precision_is_within_its_tolerance", "executor.fetch"),
    ("clipped", "test_level0", f"{FEEDS}[Softmax-fp32]", "operator.copy"),
    ("wide", "test_level0", f"{FEEDS}[Softmax-fp32]", "operator.fetch"),
    ("stale", "test_answers", f"{EVERY}[forward-bf16]", "executor.forward"),
    ("stale", "test_level0", f"{FEEDS}[Softmax-fp32]", "operators.meaning"),
    ("stale_shape", "test_answers", f"{EVERY}[forward-fp32]", "executor.forward"),
    ("stale_gradient", "test_answers", f"{EVERY}[gradients-fp32]", "executor.forward_backward"),
    ("stale_gradient", "test_level0", f"{BACKWARD}[Softmax-fp64]", "operator.backward"),
    ("stale_step", "test_answers", f"{EVERY}[steps-fp32]", "trainer.meaning"),
    ("reused", "test_answers", f"{EVERY}[forward-fp32]", "executor.lifetime"),
    ("reused", "test_answers", f"{EVERY}[gradients-fp32]", "executor.lifetime"),
    ("reused", "test_answers", f"{EVERY}[steps-fp32]", "executor.lifetime"),
    ("reused", "test_level0", f"{FEEDS}[Softmax-fp32]", "operator.lifetime"),
    ("noisy", "test_answers", f"{EVERY}[forward-fp32]", "executor.forward"),
    ("noisy", "test_answers", f"{EVERY}[gradients-fp32]", "executor.forward_backward"),
    ("noisy", "test_answers", f"{EVERY}[steps-fp32]", "trainer.meaning"),
    ("noisy", "test_networks", "test_inference_changes_nothing", "executor.forward"),
    ("noisy", "test_networks", "test_the_same_seed_gives_the_same_answer", "executor.forward"),
    ("noisy", "test_level0", f"{FEEDS}[Softmax-fp32]", "operator.forward"),
    ("hoarding", "test_process", "test_later_calls_take_no_more_memory", "executor.memory"),
    ("children", "test_process", "test_the_thread_budget_is_obeyed[inference]", "runtime.threads"),
    ("summed", "test_distributed", f"{PARTED}[clip-both-fp64]", "replica.apply"),
    ("summed", "test_distributed", "test_gradients_are_those_of_the_network", "replica.gradients"),
    ("impatient", "test_distributed", "test_gradients_are_those_of_the_network", "replica.gradients"),
    *((name, "test_native", "test_a_scheme_trains_as_one_process[ddp-fp64]", "scheme.meaning") for name in SCHEMED),
    ("added", "test_native", "test_a_scheme_trains_as_one_process[ddp-fp32]", "scheme.meaning"),
    ("frozen", "test_distributed", CHANGED, "replica.memory"),
    ("joint", "test_distributed", CHANGED, "replica.memory"),
    ("random_order", "test_distributed", "test_gradients_are_handed_out_once_each", "replica.gradients"),
    ("deaf", "test_distributed", CHANGED, "replica.apply"),
    ("deaf", "test_distributed", AVERAGED, "replica.apply"),
    ("undecayed", "test_distributed", f"{PARTED}[decay-fp64]", "replica.apply"),
    ("unclipped", "test_distributed", f"{PARTED}[clip-both-fp64]", "replica.apply"),
    ("leaking", "test_distributed", AVERAGED, "replica.apply"),
    ("keeping", "test_distributed", f"{PARTED}[decay-fp64]", "replica.lifetime"),
    ("live", "test_distributed", WEIGHTS, "replica.weights"),
    ("restarting", "test_distributed", WEIGHTS, "replica.weights"),
    ("unseen", "test_distributed", WEIGHTS, "replica.weights"),
]
"""Each fault: the mode, the file and the case that catch it, and the clause that it breaks."""

TIMED = {mistake for mistake, file, *_ in MISTAKES if file == "test_process"}
"""Modes whose cases measure time; all cases of a mode run together."""

LATER = (
    *("added", "lonely", "constant", "remembering"),
    "impatient",
    "frozen",
    "joint",
    "random_order",
    "unclipped",
    "keeping",
    "restarting",
    "unseen",
    *("children", "gradient_threads"),
    *("captures", "alternates", "restless"),
    *("rare_dropout", "channel_masks", "few_masks"),
    "stale_shape",
)
"""Modes whose kind of mistake others stand for in a short run of the tests."""

MARKS = {
    mistake: [*[pytest.mark.alone] * (mistake in TIMED), *[pytest.mark.slow] * (mistake in LATER)]
    for mistake, *_ in MISTAKES
}

SINGLE = ("tripled",)
"""Modes of the backend ``single``; the others are modes of ``wrong``."""


def _maker(mistake: str) -> str:
    """Return the backend that makes a mistake."""
    return "single" if mistake in SINGLE else "wrong"


FORKS = """
import gc, json, os, sys, tempfile
import numpy, onnx, scipy.stats, torch._dynamo
gc.collect()
gc.freeze()
for line in sys.stdin:
    with tempfile.TemporaryFile() as out:
        child = os.fork()
        if not child:
            sys.argv = ["pytest", *json.loads(line)]
            os.dup2(out.fileno(), 1)
            import pytest
            code = pytest.main(sys.argv[1:])
            sys.stdout.flush()
            os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        print(json.dumps([status, out.read().decode()]), flush=True)
"""
"""Runs pytest for each line of arguments in a fork, so that PyTorch is imported once for all."""


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    """Run modules of the kit as `kit` does, one at a time, with PyTorch imported once for all."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", FORKS], env=plugin_environment(), stdin=pipe, stdout=pipe) as forks:
        assert forks.stdin is not None and forks.stdout is not None
        orders, answers, asking = forks.stdin, forks.stdout, Lock()

        def run(backend: str, *modules: str, options: Sequence[str] = ()) -> tuple[int, str]:
            files = [f"d5suite.testing.{module}" for module in modules]
            with asking:
                arguments = ["-p", "no:cacheprovider", "--pyargs", *files, "--backend", backend, *options]
                orders.write(json.dumps(arguments).encode() + b"\n")
                orders.flush()
                code, output = json.loads(answers.readline())
                return code, output

        yield run
        orders.close()


@pytest.fixture(scope="module")
def catching(forked: Forked) -> Catching:
    """Run the cases of the short form that catch a mode's mistake, or with ``right`` of all."""
    asking = Lock()

    @cache
    def ask(backend: str, mode: str, attempt: int) -> tuple[int, str]:
        ours = [m for m in MISTAKES if mode == m[0] or (mode == "right" and (m[0] in SINGLE) == (backend == "single"))]
        files = dict.fromkeys(file for _, file, *_ in ours)
        cases = " or ".join(dict.fromkeys(case for _, _, case, _ in ours))
        return forked(f"{backend}:{mode}", *files, options=(*QUICK, "-k", cases))

    def run(backend: str, mode: str, attempt: int) -> tuple[int, str]:
        with asking:
            return ask(backend, mode, attempt)

    return run


@needs_torch
@pytest.mark.parametrize(
    ("mistake", "case", "clause"),
    [
        pytest.param(mistake, *rest, id=f"{mistake}, {file}", marks=MARKS.get(mistake, ()))
        for mistake, file, *rest in MISTAKES
    ],
)
def test_the_short_form_catches_a_mistake(
    catching: Catching, mistake: str, case: str, clause: str, attempt: int
) -> None:
    """It reports two lines: adapter, clause and figures, then the text of the clause."""
    name = _maker(mistake)
    code, output = catching(name, mistake, attempt)
    assert code == 1, output[-3000:]
    lines = output.splitlines()
    assert any(line.startswith("FAILED") and case in line for line in lines), output[-3000:]
    title = re.compile(rf"_+ {re.escape(case)}.* _+")  # the mistake may break other cases, too
    wanted = (f"backend '{name}' breaks clause '{clause}' of the contract: ", f"  The clause: {CLAUSES[clause]}.")
    reports = [lines[index + 1 : index + 4] for index, line in enumerate(lines) if title.fullmatch(line)]
    found = [report for report in reports if report[0].startswith(wanted[0]) and report[1] == wanted[1]]
    assert found, reports
    assert found[0][2].startswith(("___", "===", "---"))


@needs_torch
@pytest.mark.alone
@pytest.mark.parametrize("name", ["single", "wrong"])
def test_the_same_backend_without_a_mistake_passes(catching: Catching, name: str, attempt: int) -> None:
    code, output = catching(name, "right", attempt)
    assert code == 0, output[-3000:]
    assert name != "single" or not re.search(r"^level 1: gradients .* [1-9]\d*$", output, re.MULTILINE)


@needs_torch
@pytest.mark.slow
def test_an_asynchronous_scheme_is_held_to_its_rule(forked: Forked) -> None:
    """The right one passes; of the other, ranks take weights that they cannot have yet."""
    for mode, code in (("right", 0), ("hurried", 1)):
        ended, output = forked(f"wrong:{mode}", "test_native", options=("-k", "served"))
        assert ended == code, output[-3000:]
        caught = "backend 'wrong' breaks clause 'scheme.meaning' of the contract: served, parameters, sgd"
        assert (caught in output) == bool(code)


BROKEN = {
    "summed": ("parameter_server-fp32", "gossip-fp64", "top_k-fp64", "asynchronous-fp64"),
    "undecayed": ("all_reduce-fp64", "parameter_server-fp32", "quantised-fp64", "stale_synchronous-fp64"),
    "restarting": ("gossip-fp64", "model_averaging-fp64"),
}
"""Schemes in which a mistake of the replica must show, by mode."""


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("mode", BROKEN)
def test_the_schemes_on_a_wrong_replica_break_their_rules(forked: Forked, mode: str) -> None:
    """All cases pass in the kit of PyTorch, whose replica this is without the mistake."""
    code, output = forked(f"wrong:{mode}", "test_schemes", options=("-k", " or ".join(BROKEN[mode])))
    assert code == 1, output[-3000:]
    failed = {line.partition("[")[2].partition("]")[0] for line in output.splitlines() if "FAILED" in line}
    assert failed == set(BROKEN[mode]), output[-3000:]
    caught = "backend 'wrong' breaks clause 'scheme.meaning' of the contract: weights after step "
    assert caught in output, output[-3000:]


@needs_torch
@pytest.mark.alone
def test_a_run_of_the_whole_kit_wants_every_level_proved(kits: Kits, attempt: int) -> None:
    done = kits("partial", PARTIAL, attempt)
    assert done.returncode == 1
    assert int(_total(done)[2]) == 0, done.stdout[-3000:]
    for claim in ("gradient", "level 2"):
        assert f"backend 'partial' declares {claim}, and no case of it passed: it is not proved" in done.stdout
    assert "declares level 1," not in done.stdout


def test_the_kit_has_the_networks_that_onnx_ships() -> None:
    assert len(LIGHT) == 7
    assert {path.stem for path in LIGHT} > set(LIGHTEST)


@needs_torch
@pytest.mark.slow
def test_the_full_form_has_every_case_of_the_short_form() -> None:
    """It catches what the short form catches, which makes fewer of ONNX's node tests."""
    short, full = (kit("wrong:right", options=["--collect-only", "-q", *form]) for form in (QUICK, ()))
    cases, all_cases = ([line for line in done.stdout.splitlines() if "::" in line] for done in (short, full))
    assert sum("test_onnx_nodes" in case for case in cases) > 5
    assert 150 < len(cases) < len(all_cases) and set(cases) < set(all_cases)
    for _, file, case, _ in MISTAKES:
        assert any(f"{file}.py::{case}" in each for each in cases), case


def test_a_run_in_which_nothing_passes_fails() -> None:
    done = kit("faulty", "d5suite.testing.test_training")
    assert done.returncode == 1
    assert "no case passed: nothing is proved" in done.stdout


def test_the_kit_needs_one_known_backend() -> None:
    for backend, message in [
        ("torch,tensorflow", "tests one backend at a time"),
        ("no-such", "there is no backend 'no-such'"),
    ]:
        done = kit(backend, "d5suite.testing.test_training")
        assert done.returncode == 4
        assert message in done.stdout + done.stderr
