"""Replicas: gradients and an update make a step, with averaged gradients that of one process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from d5suite.levels.distributed import Buffers, Replica
from d5suite.levels.network import Arrays, Native
from d5suite.levels.training import Trainer
from d5suite.network import Network
from d5suite.optimizers.settings import SGD, Adam, Optimizer
from d5suite.testing.networks import fed, layers, loss_of, random_batch, steady, with_idle_parameter
from d5suite.testing.subject import Subject, tensor_errors
from d5suite.testing.test_training import OPTIMIZERS, UPDATES

AGREEMENT = {"fp64": 1e-10, "fp32": UPDATES["fp32"], "bf16": UPDATES["bf16"]}
"""Accepted relative errors of a tensor, by precision."""

OTHER = ("adam", "momentum", "clip-both")
"""Optimizers that are tried below float64 too, where the rules are the same but types differ."""

QUICK = ("decay-fp64", "clip-both-fp64", "adam-fp32")


def _trainer(subject: Subject, network: Network, optimizer: Optimizer, precision: str | None = None) -> Trainer:
    return subject.trainer(subject.executor(network, precision or subject.exact), optimizer)


def _agree(subject: Subject, clause: str, what: str, found: Arrays, expected: Arrays, precision: str) -> None:
    subject.prove(clause, tensor_errors(what, found, expected, AGREEMENT[precision]))


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, id=f"{name}-{precision}", marks=() if quick else pytest.mark.slow)
        for precision in AGREEMENT
        for name in OPTIMIZERS
        if name == "rates"
        or not (OPTIMIZERS[name].rates or OPTIMIZERS[name].accumulate > 1 or name == "clip-norm-idle")
        if precision == "fp64" or name in OTHER
        for quick in (f"{name}-{precision}" in QUICK,)
    ],
)
def test_gradients_and_their_update_make_a_step(subject: Subject, name: str, precision: str) -> None:
    network = with_idle_parameter(steady(precision))
    subject.require(network, gradient=True, level=3, precision=precision)
    optimizer, rates, _ = OPTIMIZERS[name]
    whole, parted = (_trainer(subject, network, optimizer, precision) for _ in range(2))
    replica = subject.replica(parted)
    losses: list[tuple[float, float]] = []
    for step in range(5):
        for trainer in (whole, parted):
            trainer.set_learning_rate(rates[min(step, len(rates) - 1)] if rates else optimizer.learning_rate)
        batch = random_batch(network, seed=step)
        expected = whole.step(fed(whole.executor, batch))
        loss, gradients = replica.gradients(fed(parted.executor, batch))
        if step % 2:  # arrays of the caller's own, which it overwrites
            gradients = {key: value.copy() for key, value in gradients.items()}
        replica.apply(gradients)
        if step % 2:
            for array in gradients.values():
                array.fill(np.nan)
        losses.append((loss_of(parted.executor, loss), loss_of(whole.executor, expected)))
    for what, has, should in (
        ("the parameters", parted.executor.parameters(), whole.executor.parameters()),
        ("the optimizer's state", parted.state(), whole.state()),
    ):
        clause = "replica.lifetime" if any(np.isnan(value).any() for value in has.values()) else "replica.apply"
        _agree(subject, clause, f"{what} after 5 updates", has, should, precision)
    found, wanted = np.array(losses).T
    subject.close("replica.gradients", "the losses of 5 steps", found, wanted, AGREEMENT[precision])


def _averaged(all_gradients: list[Buffers]) -> None:
    """Overwrite each rank's arrays with the mean over ranks."""
    for name in all_gradients[0]:
        mean = sum(gradients[name] for gradients in all_gradients) / len(all_gradients)
        for gradients in all_gradients:
            gradients[name][...] = mean


@pytest.mark.parametrize(("name", "ranks"), [("clip-norm", 2), pytest.param("adam", 3, marks=pytest.mark.slow)])
def test_replicas_with_averaged_gradients_train_as_one_process(subject: Subject, ranks: int, name: str) -> None:
    precision = subject.exact
    network = with_idle_parameter(steady(precision))
    subject.require(network, gradient=True, level=3)
    optimizer = OPTIMIZERS[name].optimizer
    one, *others = (_trainer(subject, network, optimizer) for _ in range(1 + ranks))
    replicas = [subject.replica(trainer) for trainer in others]
    losses: list[tuple[float, float]] = []
    for step in range(10):
        batches = [random_batch(network, seed=ranks * step + rank) for rank in range(ranks)]
        loss = loss_of(one.executor, one.step(*(fed(one.executor, batch) for batch in batches)))
        answers = [r.gradients(fed(r.trainer.executor, batch)) for r, batch in zip(replicas, batches, strict=True)]
        _averaged([gradients for _, gradients in answers])
        for replica, (_, gradients) in zip(replicas, answers, strict=True):
            replica.apply(gradients)
        each = [loss_of(r.trainer.executor, answer) for r, (answer, _) in zip(replicas, answers, strict=True)]
        losses.append((float(np.mean(each)), loss))
    expected = {**one.executor.parameters(), **one.state()}
    first, *rest = ({**trainer.executor.parameters(), **trainer.state()} for trainer in others)
    kept = {key: value for key, value in expected.items() if key not in network.statistics}
    _agree(subject, "replica.apply", f"{ranks} replicas after 10 steps", first, kept, precision)
    for other in rest:
        ours, theirs = ({key: each[key] for key in kept} for each in (first, other))
        subject.repeated("replica.apply", "two replicas with equal gradients", theirs, ours, precision)
    found, wanted = np.array(losses).T
    subject.close("replica.gradients", "the mean losses of 10 steps", found, wanted, AGREEMENT[precision])
    still = [key for key in network.statistics if all(np.array_equal(first[key], other[key]) for other in rest)]
    subject.hold("replica.gradients", not still, f"{', '.join(still)} is one for all replicas, not each one's own")


@pytest.mark.parametrize(
    "precision", ["fp64", pytest.param("fp32", marks=pytest.mark.slow), pytest.param("bf16", marks=pytest.mark.slow)]
)
def test_the_arrays_of_gradients_are_the_callers_to_change(subject: Subject, precision: str) -> None:
    network = with_idle_parameter(layers())
    subject.require(network, gradient=True, level=3, precision=precision)
    rate = 2.0**-6
    trainer = _trainer(subject, network, SGD(rate), precision)
    replica = subject.replica(trainer)
    _, gradients = replica.gradients(fed(trainer.executor, random_batch(network)))
    dtype = np.dtype(np.float64 if precision == "fp64" else np.float32)
    names = tuple(network.parameters)
    subject.hold("replica.memory", tuple(gradients) == names, f"gradients has {', '.join(gradients)}")
    for name, array in gradients.items():
        subject.hold("replica.memory", array.flags.writeable, f"the gradient of {name} is read-only")
        subject.hold("replica.memory", array.flags.c_contiguous, f"the gradient of {name} is not contiguous")
        right = (array.dtype, array.size) == (dtype, network.initializers[name].size)
        subject.hold("replica.memory", right, f"the gradient of {name} is {array.dtype} of shape {array.shape}")
    places = {name: array.ctypes.data for name, array in gradients.items()}
    order = sorted(places, key=lambda name: places[name])
    for name, following in itertools.pairwise(order):
        apart = places[name] + gradients[name].nbytes <= places[following]
        subject.hold("replica.memory", apart, f"the gradients of {name} and {following} overlap")
    before = trainer.executor.parameters()
    for index, array in enumerate(gradients.values()):
        array.fill(index + 1)
    replica.apply(gradients)
    after = trainer.executor.parameters()
    for index, name in enumerate(names):
        wanted = before[name].astype(dtype) - dtype.type(rate * (index + 1))
        what = f"{name} after an update with changed arrays"
        subject.close("replica.apply", what, after[name], wanted, subject.repeats(precision, 1e-6))


def test_gradients_are_those_of_the_network_and_change_nothing(subject: Subject) -> None:
    network = with_idle_parameter(steady(subject.exact))
    subject.require(network, gradient=True, level=3)
    one, other = random_batch(network), random_batch(network, 4, seed=1)
    trainer = _trainer(subject, network, Adam(0.02))
    replica, reference = subject.replica(trainer), subject.executor(network)
    replica.apply(replica.gradients(fed(trainer.executor, one))[1])
    start, state = trainer.executor.parameters(), trainer.state()
    reference.load_parameters(start)
    loss, gradients = replica.gradients(fed(trainer.executor, other))
    expected = reference.fetch(reference.forward_backward(fed(trainer.executor, other)))
    copies = {name: array.copy() for name, array in gradients.items()}
    trainer.executor.fetch(trainer.executor.forward(trainer.executor.feed({"image": one[0]})))
    subject.same("replica.lifetime", "gradients after an inference", gradients, copies)
    found = trainer.executor.fetch({**replica.native(gradients), **loss})
    _agree(subject, "replica.gradients", "a gradient", found, expected, subject.exact)
    after = trainer.executor.parameters()
    parameters = {name: start[name] for name in network.parameters}
    subject.same("replica.gradients", "parameters", {name: after[name] for name in parameters}, parameters)
    subject.same("replica.gradients", "the optimizer's state", trainer.state(), state)
    value = loss_of(trainer.executor, loss)
    replica.apply(gradients)
    replica.gradients(fed(trainer.executor, one))
    subject.hold("replica.lifetime", loss_of(trainer.executor, loss) == value, "the loss changes after later calls")


def test_gradients_are_handed_out_once_each_and_in_one_order(subject: Subject) -> None:
    network = with_idle_parameter(layers())
    subject.require(network, gradient=True, level=3)
    batches = [random_batch(network, seed=step) for step in range(3)]
    whole, trainer = (_trainer(subject, network, SGD(2.0**-4, momentum=0.5)) for _ in range(2))
    replica = subject.replica(trainer)
    orders = []
    for step, batch in enumerate(batches):
        order: list[str] = []
        loss = whole.gradients(fed(whole.executor, batch))
        doubled = {name: value * 2 for name, value in subject.replica(whole).buffers(_without_loss(loss)).items()}
        subject.replica(whole).apply(doubled)

        def ready(name: str, array: np.ndarray, order: list[str] = order) -> None:
            order.append(name)
            array *= 2

        _, gradients = replica.gradients_early(fed(trainer.executor, batch), ready)
        once = sorted(order) == sorted(network.parameters)
        subject.hold("replica.gradients", once, f"gradients_early hands out {', '.join(order)}")
        subject.hold("replica.memory", tuple(gradients) == replica.names, f"gradients has {', '.join(gradients)}")
        replica.apply(gradients)
        if step == 1:  # hooks must not outlive the call
            for each in (whole, trainer):
                each.step(fed(each.executor, batch))
        orders.append(order)
    subject.hold("replica.gradients", orders[0] == orders[1] == orders[2], "the order of gradients_early changes")
    found, wanted = trainer.executor.parameters(), whole.executor.parameters()
    _agree(subject, "replica.apply", "gradients doubled as they came", found, wanted, subject.exact)


def _without_loss(answer: Native) -> Native:
    return {name: value for name, value in answer.items() if name != "loss"}


def test_parameters_are_copied_and_the_optimizers_state_stays(subject: Subject) -> None:
    precision = subject.timed
    network = with_idle_parameter(layers())
    subject.require(network, gradient=True, level=3)
    batch = random_batch(network)

    def trained(seed: int) -> Replica:
        trainer = _trainer(subject, network, SGD(2.0**-4, momentum=0.5), precision)
        trainer.step(fed(trainer.executor, random_batch(network, seed=seed)))
        return subject.replica(trainer)

    def answer(replica: Replica) -> np.ndarray:
        executor = replica.trainer.executor
        return executor.fetch(executor.forward(executor.feed({"image": batch[0]})))[network.output]

    giver, taker = trained(1), trained(2)
    executor = taker.trainer.executor
    weights = giver.weights()
    copies = {name: array.copy() for name, array in weights.items()}
    subject.hold("replica.weights", tuple(weights) == giver.names, f"weights has {', '.join(weights)}")
    giver.apply(giver.gradients(fed(giver.trainer.executor, batch))[1])
    subject.same("replica.weights", "weights after an update", weights, copies)
    given, moved = giver.trainer.executor.parameters(), giver.weights()
    for array in (*weights.values(), *moved.values()):
        array.fill(np.nan)
    now = giver.trainer.executor.parameters()
    subject.same("replica.weights", "parameters after weights were overwritten", now, given)
    held = taker.trainer.state()
    moved = giver.weights()
    before = answer(taker)
    taker.load_weights(moved)
    for array in moved.values():
        array.fill(np.nan)
    subject.same("replica.weights", "parameters that were loaded", executor.parameters(), given)
    subject.same("replica.weights", "the optimizer's state after load_weights", taker.trainer.state(), held)
    answers = answer(taker), answer(giver)
    seen = subject.apart(answers[0], before, precision)
    subject.hold("replica.weights", seen, "inference does not see loaded weights")
    subject.close("replica.weights", "inference with loaded weights", *answers, subject.repeats(precision, 1e-5))
