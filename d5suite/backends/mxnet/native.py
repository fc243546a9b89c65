"""MXNet's own schemes: its distributed KVStore, with servers and a scheduler beside the ranks.

Run as ``python -m d5suite.backends.mxnet.native server``, or ``scheduler``, it is one of these.
Imports MXNet, `d5suite.levels`, `d5suite.optimizers` and the adapter's `runtime`, `distributed` and
`training`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from d5suite.backends.mxnet.distributed import Replica
from d5suite.backends.mxnet.runtime import mx
from d5suite.backends.mxnet.training import clip, has_rate, native_optimizer
from d5suite.levels.distributed import Replica as AnyReplica
from d5suite.levels.native import FrameworkScheme, Meeting, NativeSettings
from d5suite.levels.network import Native
from d5suite.optimizers.settings import Optimizer, optimizer_from_dict

PATIENCE_S = 30
"""Seconds that a server may take to end after the last worker has left it."""

_ROLE = "DMLC_ROLE"


class KVStore(FrameworkScheme):
    """Base of MXNet's distributed stores: joins the ranks, gives arrays keys, and ends the run.

    A key is an array's number. An array keeps its key when a scheme is constructed again, so that
    servers store it once.
    """

    kind: ClassVar[str]
    """MXNet's name of the store."""

    store: ClassVar[Any] = None
    """One per process."""

    rank: ClassVar[int]
    size: ClassVar[int]
    _known: ClassVar[dict[tuple[Any, ...], int]]
    replica: Replica

    def __init__(self, replica: AnyReplica, settings: NativeSettings) -> None:
        super().__init__(replica, settings)
        self._trainer = self.replica.trainer
        executor = self._trainer.executor
        _, self._loss = executor.network.require_loss()
        self._weights = [executor.weights[name].data() for name in replica.names]
        arrays = tuple((each.shape, each.dtype) for each in self._weights)
        new = arrays not in self._known
        first = self._known.setdefault(arrays, sum(len(each) for each in self._known))
        self._keys = list(range(first, first + len(arrays)))
        if new:
            for key, weight in zip(self._keys, self._weights, strict=True):
                self.store.init(key, mx.nd.zeros_like(weight))

    @classmethod
    def meet(cls, meeting: Meeting, settings: NativeSettings) -> Callable[[], None]:
        """See `FrameworkScheme.meet`: every rank starts its servers, and rank 0 the scheduler."""
        chosen = settings.to_dict()
        servers = chosen["servers"] or meeting.size
        host, _, port = meeting.addresses()[0].partition(":")
        os.environ |= {
            _ROLE: "worker",
            "DMLC_PS_ROOT_URI": host,
            "DMLC_PS_ROOT_PORT": port,
            "DMLC_NODE_HOST": meeting.address(meeting.rank),
            "DMLC_NUM_WORKER": str(meeting.size),
            "DMLC_NUM_SERVER": str(servers),
            "MXNET_KVSTORE_BIGARRAY_BOUND": str(chosen["split_elements"]),
        }
        roles = ["scheduler"] * (meeting.rank == 0) + ["server"] * len(range(meeting.rank, servers, meeting.size))
        helpers = Helpers(roles)
        store = mx.kv.create(cls.kind)
        KVStore.store, KVStore.rank, KVStore.size, KVStore._known = store, meeting.rank, meeting.size, {}

        def leave() -> None:
            helpers.may_end()
            mx.nd.waitall()
            mx.base.check_call(mx.base._LIB.MXKVStoreFree(store.handle))  # leaves, and then stops the servers
            store.handle = None
            helpers.wait()

        return leave

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Run the context's body on one rank after the other."""
        for rank in range(self.size):
            if rank == self.rank:
                yield
                mx.nd.waitall()
            self.store._barrier()

    def _command(self, **what: Any) -> None:
        """Send a command to all servers, and return when they have executed it."""
        self.store._send_command_to_servers(0, json.dumps(what))


class DistSync(KVStore):
    """``dist_sync``: servers add the gradients, and every rank makes its own update.

    As `gluon.Trainer` with ``update_on_kvstore=False``: servers that updated would clip each array
    by itself.
    """

    kind = "dist_sync"

    def step(self, feed: Native) -> Native:
        """See `FrameworkScheme.step`."""
        answer = self._trainer.gradients(feed)
        for priority, (key, name) in enumerate(zip(self._keys, self.replica.names, strict=True)):
            self.store.pushpull(key, answer[name], out=answer[name], priority=-priority)
        self._trainer.apply_sums(answer, self.size)
        return {self._loss: answer[self._loss]}


class DistAsync(KVStore):
    """``dist_async``: a server updates its weights with each gradient as it comes.

    As `gluon.Trainer`, except that it sends its optimizer as a pickle, which any process could
    send; here the servers take the optimizer's settings as JSON. Each rank clips its own gradients,
    since a server sees one array at a time. The servers have one learning rate, which a rank sends
    when it changes.
    """

    kind = "dist_async"

    def __init__(self, replica: AnyReplica, settings: NativeSettings) -> None:
        super().__init__(replica, settings)
        self._in_turn: bool = settings.to_dict()["in_turn"]
        self._rate = self._trainer.learning_rate
        self._unused = [weight.grad() for weight in self._trainer.executor.unused_parameters]
        self.store._barrier()  # until all ranks have finished with the previous scheme
        if self.rank == 0:
            self._command(hold=True)
            self._push(self._weights)
            self._pull()
            mx.nd.waitall()
            optimizer = {**self._trainer.optimizer.to_dict(), "learning_rate": self._rate}
            self._command(optimizer=optimizer, exact=self._trainer.executor.precision == "fp64")
        self.store._barrier()

    def _push(self, arrays: Sequence[Any]) -> None:
        for priority, (key, array) in enumerate(zip(self._keys, arrays, strict=True)):
            self.store.push(key, array, priority=-priority)

    def _pull(self) -> None:
        for priority, (key, weight) in enumerate(zip(self._keys, self._weights, strict=True)):
            self.store.pull(key, out=weight, priority=-priority)

    def step(self, feed: Native) -> Native:
        """See `FrameworkScheme.step`."""
        answer = self._trainer.gradients(feed)
        gradients = [answer[name] for name in self.replica.names]
        clip(gradients, self._trainer.optimizer)
        with self._turn() if self._in_turn else contextlib.nullcontext():
            if self._trainer.learning_rate != self._rate:
                self._rate = self._trainer.learning_rate
                self._command(rate=self._rate)
            self._push(gradients)
            self._pull()
        for gradient in self._unused:  # no backward pass overwrites them, but pulling overwrites what was pushed
            gradient[:] = 0
        return {self._loss: answer[self._loss]}

    def finish(self) -> None:
        """See `FrameworkScheme.finish`: pull the weights after all ranks' gradients."""
        mx.nd.waitall()
        self.store._barrier()
        self._pull()
        mx.nd.waitall()
        self.store._barrier()


SCHEMES: Mapping[str, type[FrameworkScheme]] = {"dist_sync": DistSync, "dist_async": DistAsync}


class Helpers:
    """Servers or a scheduler: processes that end with this rank.

    Each ends when its standard input closes, whatever ends this process. If one ends too early, the
    rank ends as well, because it would wait for the process forever.
    """

    def __init__(self, roles: Sequence[str]) -> None:
        command = [sys.executable, "-m", __name__]
        self._leaving = False
        self.processes = [subprocess.Popen([*command, role], stdin=subprocess.PIPE) for role in roles]
        for role, process in zip(roles, self.processes, strict=True):
            threading.Thread(target=self._watch, args=(role, process), daemon=True).start()

    def _watch(self, role: str, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._leaving:
            print(f"error: MXNet's {role} {process.pid} ended with status {code} during the job", file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)

    def may_end(self) -> None:
        """From now on, treat the end of these processes as no failure."""
        self._leaving = True

    def wait(self) -> None:
        """Wait until all processes have ended; kill those that take too long."""
        for process in self.processes:
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            process.stdin.close()


class _Server(mx.kvstore.kvstore_server.KVStoreServer):
    """A server with JSON commands: hold what is pushed, use an optimizer, change its rate."""

    def _controller(self) -> Callable[..., None]:
        self._updater: Any = None
        return self._guarded(self._obey)

    def _guarded(self, function: Callable[..., None]) -> Callable[..., None]:
        """Let an error end the process; MXNet would continue."""

        def call(*arguments: Any) -> None:
            try:
                function(*arguments)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)

        return call

    def _obey(self, _: int, body: bytes, __: Any) -> None:
        order = json.loads(body)
        if "hold" in order:
            self.kvstore._set_updater(self._guarded(_hold))
        elif "optimizer" in order:
            optimizer: Optimizer = optimizer_from_dict(order["optimizer"])
            self._updater = mx.optimizer.get_updater(native_optimizer(optimizer, exact=order["exact"]))
            self.kvstore._set_updater(self._guarded(self._updater))
        else:
            self._change_rate(order["rate"])

    def _change_rate(self, rate: float) -> None:
        rule = self._updater.optimizer
        if has_rate(rule):
            for velocity in self._updater.states.values():
                if velocity is not None:
                    velocity *= rate / rule.learning_rate
        rule.set_learning_rate(rate)


def _hold(_: int, pushed: Any, held: Any) -> None:
    held[:] = pushed


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def main() -> None:
    """Serve, or schedule, until the workers have left."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ[_ROLE] = sys.argv[1]  # not earlier: with it, importing MXNet starts a server
    _Server(mx.kv.create("dist")).run()


if __name__ == "__main__":
    main()
