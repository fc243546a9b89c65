"""A real Slurm cluster of two nodes on this machine, from Debian's packages.

It has ports, a folder and a munge socket of its own, and leaves nothing. Each node has a half of
the CPUs, because workers bind themselves to the first of those that they may use; it says that it
has two, so that two jobs can share it. By hand:
``python -m tests.launch.slurm.cluster bash`` runs a command in which ``sinfo`` answers.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.conftest import end_with_tests

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue", "sinfo")

LIMIT_S = 120.0
"""Seconds for a daemon to answer, on a busy machine too."""

CONFIGURATION = """
ClusterName=d5suite
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerNode=1500
MaxArraySize=2
JobAcctGatherParams=OverMemoryKill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,requeue_delay=1
SchedulerType=sched/backfill
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
ReturnToService=2
MpiDefault=none
KillWait=2
InactiveLimit=0
SwitchType=switch/none
SlurmdParameters=config_overrides
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=2 RealMemory=3000
PartitionName=cpu Nodes=n[1-2] Default=YES MaxTime=02:00:00 DefaultTime=00:30:00 PriorityTier=1 PreemptMode=REQUEUE
PartitionName=urgent Nodes=n[1-2] MaxTime=02:00:00 PriorityTier=10 PreemptMode=OFF
""".lstrip()


def lacking() -> str | None:
    """Why no cluster can be started here; None if one can."""
    missing = [each for each in PROGRAMS if shutil.which(each) is None]
    if missing:
        return f"Slurm is not installed: no {missing[0]} (apt-get install slurm-wlm munge)"
    return None if os.geteuid() == 0 else "Slurm's daemons need root here"


@dataclass
class Cluster:
    """What a test asks of it.

    Attributes
    ----------
    folder : Path
        Configuration, logs and state.
    """

    folder: Path
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which Slurm's commands find it."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def ask(self, *command: str) -> str:
        """What one of Slurm's commands answers."""
        done = subprocess.run(
            command, env=os.environ | self.environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == 0, f"{command}: {done.stderr}\n{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        """The last lines of all daemons."""
        found = []
        for each in sorted(self.folder.glob("*.log")):
            lines = each.read_text(errors="replace").splitlines()[-15:]
            found.append("\n".join([f"--- {each.name}", *lines]))
        return "\n".join(found)

    def start(self) -> None:
        """Start munge, the controller and both nodes, and wait until they answer."""
        munge, number = self.folder / "munge.key", secrets.token_bytes(1024)
        munge.write_bytes(number)
        munge.chmod(0o600)
        self._start(
            "munged", "--foreground", "--force", f"--key-file={munge}", f"--socket={self.folder}/munge.socket",
            f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log",
            f"--seed-file={self.folder}/munged.seed",
        )  # fmt: skip
        self._wait(lambda: (self.folder / "munge.socket").exists(), "munged")
        ports = _free_ports()
        text = CONFIGURATION.format(
            host=socket.gethostname(), ports=ports, folder=self.folder, user=pwd.getpwuid(os.geteuid()).pw_name
        )
        (self.folder / "slurm.conf").write_text(text)
        for each in ("state", "n1", "n2"):
            (self.folder / each).mkdir(exist_ok=True)
        self.start_controller()
        cpus = sorted(os.sched_getaffinity(0))
        half = (len(cpus) + 1) // 2
        for each, own in (("n1", cpus[:half]), ("n2", cpus[-half:])):
            self._start("slurmd", "-D", "-N", each, name=each, cpus=own)
        self._wait(self.idle, "the nodes")

    def start_controller(self) -> None:
        """Start the controller; again after `stop_controller`."""
        self._start("slurmctld", "-D")
        self._wait(lambda: self._answers("scontrol", "ping"), "slurmctld")

    def stop_controller(self) -> None:
        """End the controller: commands of Slurm get no answer."""
        process = self._processes.pop("slurmctld")
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=LIMIT_S)

    def idle(self) -> bool:
        """Whether both nodes are free."""
        try:
            states = self.ask("sinfo", "--noheader", "--Node", "--partition=cpu", "--format=%T").split()
        except AssertionError:
            return False
        return states == ["idle", "idle"]

    def revive(self) -> None:
        """Put the cluster back: no jobs, both nodes up."""
        self.ask("scancel", "--user", str(os.geteuid()))
        for each in ("n1", "n2"):
            if (
                self.ask("sinfo", "--noheader", f"--nodes={each}", "--format=%T")
                .split()[0]
                .startswith(("down", "drain"))
            ):
                self.ask("scontrol", "update", f"nodename={each}", "state=resume")
        self._wait(self.idle, "both nodes")

    def stop(self) -> None:
        """End all daemons, and whatever they have started."""
        if "slurmctld" in self._processes:
            subprocess.run(
                ["scancel", "--user", str(os.geteuid())], env=os.environ | self.environment, timeout=LIMIT_S,
                capture_output=True,
            )  # fmt: skip
        family = []
        for each in self._processes.values():
            with contextlib.suppress(psutil.Error):
                family += psutil.Process(each.pid).children(recursive=True)
        for each in reversed(self._processes.values()):
            each.terminate()
        for each in self._processes.values():
            try:
                each.wait(timeout=20)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
        for process in psutil.process_iter(["cmdline"]):  # slurmstepd is no child of slurmd
            if any(str(self.folder) in word for word in process.info["cmdline"] or ()):
                family.append(process)
        for orphan in family:
            with contextlib.suppress(psutil.Error):
                orphan.kill()

    def _start(
        self, program: str, *arguments: str, name: str | None = None, cpus: Collection[int] | None = None
    ) -> None:
        def begin() -> None:
            end_with_tests()
            if cpus is not None:
                os.sched_setaffinity(0, cpus)

        with (self.folder / f"{name or program}.out.log").open("ab") as output:
            self._processes[name or program] = subprocess.Popen(
                [str(shutil.which(program)), *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=os.environ | self.environment, start_new_session=True, preexec_fn=begin,
            )  # fmt: skip

    def _answers(self, *command: str) -> bool:
        done = subprocess.run(
            command, env=os.environ | self.environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        return done.returncode == 0

    def _wait(self, ready: object, what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not ready():  # type: ignore[operator]
            dead = [name for name, each in self._processes.items() if each.poll() is not None]
            assert not dead and time.monotonic() < deadline, f"{what} did not come; ended: {dead}\n{self.logs()}"
            time.sleep(0.05)


def _free_ports() -> list[int]:
    """A port for the controller, and two that follow each other for the nodes."""
    while True:
        with contextlib.ExitStack() as held:
            first = held.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            second = held.enter_context(socket.socket())
            second.bind(("127.0.0.1", 0))
            third = held.enter_context(socket.socket())
            port = second.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                third.bind(("127.0.0.1", port + 1))
                return [first.getsockname()[1], port, port + 1]


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster that runs, in a folder that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="d5suite-slurm-"))
    folder.chmod(0o755)
    found = Cluster(folder)
    try:
        found.start()
        yield found
    finally:
        found.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    with cluster() as started:
        sys.exit(subprocess.run(sys.argv[1:] or ["sinfo"], env=os.environ | started.environment).returncode)
