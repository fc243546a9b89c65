"""The right replica with one mistake."""

from typing import Any

from d5suite.backends.torch import distributed as right

_velocities: dict[str, Any] = {}


class Replica(right.Replica):
    @property
    def _mode(self) -> str:
        return self.trainer.executor.mode

    def gradients(self, feed: Any) -> Any:
        if self._mode == "impatient":
            answer = self.trainer.step(feed)
            loss, gradients = super().gradients(feed)
            return {name: answer[name] for name in loss}, gradients
        loss, gradients = super().gradients(feed)
        if self._mode == "summed":  # as if the loss were the sum over the batch
            count = len(feed[self.trainer.executor.network.input])
            gradients = {name: array * count for name, array in gradients.items()}
        if self._mode == "frozen":
            for array in gradients.values():
                array.flags.writeable = False
        if self._mode == "joint":
            gradients[self.names[1]] = gradients[self.names[0]].reshape(-1)[: gradients[self.names[1]].size]
        self._first = {name: array.copy() for name, array in gradients.items()}
        return loss, gradients

    def gradients_early(self, feed: Any, ready: Any) -> Any:
        if self._mode != "random_order":
            return super().gradients_early(feed, ready)
        loss, gradients = super().gradients(feed)
        self._turn = -getattr(self, "_turn", 1)
        for name in list(gradients)[:: self._turn]:
            ready(name, gradients[name])
        return loss, gradients

    def apply(self, gradients: Any) -> None:
        trainer: Any = self.trainer
        if self._mode == "deaf":
            gradients = self._first
        if self._mode == "undecayed":
            for group in trainer._optimizer.param_groups:
                group["weight_decay"] = 0
        if self._mode == "unclipped":
            trainer._clips = False
        if self._mode == "leaking":  # one optimizer's state for all replicas of the process
            for tensor, name in zip(trainer._tensors, self.names, strict=True):
                held = trainer._optimizer.state[tensor]
                if name in _velocities and "momentum_buffer" in held:
                    held["momentum_buffer"] = _velocities[name]
        super().apply(gradients)
        for tensor, name in zip(trainer._tensors, self.names, strict=True):
            _velocities[name] = trainer._optimizer.state[tensor].get("momentum_buffer")
        if self._mode == "keeping":
            for tensor, name in zip(trainer._tensors, self.names, strict=True):
                if "momentum_buffer" in trainer._optimizer.state[tensor]:
                    trainer._optimizer.state[tensor]["momentum_buffer"] = self.native(gradients)[name]

    def weights(self) -> Any:
        if self._mode != "live":
            return super().weights()
        return {name: self.view(name, tensor) for name, tensor in self._tensors.items()}

    def load_weights(self, weights: Any) -> None:
        executor: Any = self.trainer.executor
        before = [weight.detach().clone() for weight in executor._inference_weights]
        super().load_weights(weights)
        if self._mode == "restarting":
            self.trainer.load_state(self.trainer.initial_state())
        if self._mode == "unseen":
            executor._inference_weights, executor._stale = before, False
